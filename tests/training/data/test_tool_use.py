"""Conversations with function calls: made, and learnt as a chat template writes them."""

import dataclasses

import pytest

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.data.documents import documents_of
from jaxllm.training.data.encoders import MIN_VOCAB_SIZE, ModelEncoder, PieceEncoder, train_tokenizer
from jaxllm.training.data.tool_use import conversations
from tests.tiny import END_ID, tiny_tokenizer

TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list}


def said(role, content):
    return {"role": role, "content": content}


def test_calls_are_learnt_as_the_template_writes_them():
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} "
        "{{ c.function.arguments | tojson }}){% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{{ tools and '' }}"
    )
    tokenizer = Tokenizer(dataclasses.replace(tiny_tokenizer(), chat_template=template, eos_ids=(END_ID,)))
    call = {"type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    talk = [said("user", "hi"), {"role": "assistant", "tool_calls": [call], "reasoning_content": "why"}]
    talk += [{"role": "tool", "name": "find", "content": "2"}, said("assistant", "two")]
    documents = list(documents_of({"messages": talk, "tools": [{"type": "function"}]}))
    first, second = ModelEncoder(tokenizer).encode(documents)
    learnt = [tokenizer.decode(ids[prompt:], skip_special_tokens=False) for ids, prompt in (first, second)]
    end = tokenizer.decode([END_ID], skip_special_tokens=False)
    assert learnt == [f'[why](find {{"a": 1}}){end}', f"two{end}"]
    assert "(find" in tokenizer.decode(second[0][: second[1]])
    with pytest.raises(ConfigError, match="no place for the tools"):
        PieceEncoder(train_tokenizer(["hi hello"], MIN_VOCAB_SIZE)).encode(documents)


def test_made_conversations_call_functions_by_their_schemas():
    made = list(conversations(300, seed=1))
    assert made == list(conversations(300, seed=1)) != list(conversations(300, seed=2))
    names, without = set(), 0
    for each in made:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in each["tools"]}
        calls = [call["function"] for message in each["messages"] for call in message.get("tool_calls", ())]
        without += not calls
        for call in calls:
            names.add(call["name"])
            schema, arguments = schemas[call["name"]], call["arguments"]
            assert {*schema.get("required", ())} <= {*arguments} <= {*schema["properties"]}
            for name, value in arguments.items():
                own = schema["properties"][name]
                assert isinstance(value, TYPES[own["type"]])
                assert value in own.get("enum", [value])
        assert list(documents_of(each))
    assert len(names) > 100
    assert 20 < without < 80
