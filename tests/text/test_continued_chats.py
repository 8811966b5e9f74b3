"""Prompts that end within an assistant's last message, which the answer continues."""

from typing import Any

import pytest

from jaxllm.errors import ConfigError
from tests.text.test_tokenizer import (
    CHATML,
    CHATS,
    FILES,
    GEMMA,
    LIBRARY,
    LLAMA3,
    MISTRAL,
    NOW,
    with_template,
)


@pytest.mark.parametrize("template", [LLAMA3, CHATML, GEMMA, MISTRAL])
def test_an_assistants_last_message_is_continued_as_transformers_does(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    peer = transformers.PreTrainedTokenizerFast(tokenizer_object=LIBRARY, **FILES.special)
    clock = type("Clock", (), {"now": staticmethod(lambda: NOW)})
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    said = [*CHATS["three turns"], {"role": "assistant", "content": "Once <s> upon"}]
    expected = peer.apply_chat_template(
        said, chat_template=template, continue_final_message=True, tokenize=False
    )
    tokenizer = with_template(template)
    assert tokenizer.render_chat(said, now=NOW) == expected
    # No message spells a special token, this one neither.
    ids = tokenizer.encode_chat(said, now=NOW)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert max(ids[-len("Once <s> upon") :]) < LIBRARY.token_to_id("<s>")
    closed = tokenizer.render_chat(said, continue_final=False, now=NOW)
    assert closed.startswith(expected)
    assert len(closed) > len(expected)
    spaced = tokenizer.render_chat([*said[:-1], {**said[-1], "content": "Once "}], now=NOW)
    assert spaced == expected.replace("Once <s> upon", "Once ")


@pytest.mark.parametrize(
    ("template", "last", "part"),
    [
        (CHATML, {"role": "user", "content": "Hi"}, "the last message is none: it is of 'user'"),
        (CHATML, {"role": "assistant", "content": "", "tool_calls": [{}]}, "send their results"),
        (CHATML, {"role": "assistant", "content": 5}, "a text or a list of parts"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "Hi"}, "does not write the text"),
    ],
)
def test_what_cannot_be_continued_is_refused(template: str, last: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        with_template(template).encode_chat([CHATS["system"][1], last], continue_final=True)
