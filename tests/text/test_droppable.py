"""Tests which tokens of a prompt may be dropped: the rule by hand, and that only the user's text is."""

import dataclasses
from datetime import datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import (
    conversation_tokens,
    free_spans,
    prompt_tokens,
)
from jaxllm.text.prompts import Prompt, prompt_ids
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer())
PLAIN = Tokenizer(tiny_tokenizer(chat=False))


def free(user, **how):
    return [user[first:last].strip() for first, last in free_spans(user, **how)]


def test_the_rule_by_hand():
    assert free("a dull film , badly cut .") == ["a dull film , badly cut ."]
    assert free("It rained. Who won?") == ["It rained."]
    assert free("Who won?\nIt rained.") == ["It rained."]
    assert free("Amanda: I baked cookies.\nJerry: Sure!") == ["I baked cookies.", "Sure!"]
    assert free("Read on:\n1. first\n- second\n* third") == ["Read on:", "first", "second", "third"]
    listed = "Pick one.\nA) red and blue\n(B) green\nC: none"
    assert free(listed) == ["Pick one."]
    assert free("red is warm\nnot red") == ["red is warm\nnot red"]
    assert free("- red: is warm\n2) maps.find_route: finds one\n- not so: cold") == [
        "is warm", "finds one", "not so: cold"
    ]  # fmt: skip
    assert free("Rain. And then he", goes_on=True) == ["Rain."]
    assert free("Question: Rain fell. Why is it wet?\nAnswer:", goes_on=True) == ["Rain fell."]
    assert free("") == free(" \n ") == []


def test_the_rule_on_tasks():
    screen = "<button id=0 text='Settings'></button>\n<button id=1>Shutter</button>"
    record = {"label": [1, "null"], "history": "- Start the app.", "state": screen}
    step = readers.ui_step("camera", "take a photo", record)
    assert free(step.user) == [
        "camera", "Start the app.", "<button text='Settings'></button>\n<button>Shutter</button>"
    ]  # fmt: skip
    record = {"id": "0", "question": [[{"content": "Find the area."}]], "function": [{"name": "area"}]}
    offered = {"area": "- area: Computes it.", "max": "- max: Of two. Or more."}
    choice = readers.api_choice(record, "area", offered, 0)
    described = [line.partition(": ")[2] for line in choice.user.splitlines()[1:]]
    assert free(choice.user) == ["Find the area.", *described]
    news = readers.NEWS.example({"text": "Sports fans met. Why?", "label": "World"})
    assert free(news.user) == ["Sports fans met."]


WORDS = st.text(alphabet="ab <|>?:.\n", max_size=40)


@given(WORDS, WORDS)
def test_only_the_users_text_may_go(system, user):
    example = TaskExample(system=system, user=user, answer="")
    for tokenizer in (TOKENIZER, PLAIN):
        prompt = prompt_tokens(tokenizer, example)
        text, spans = prompt.text, prompt.spans
        # The instruction comes before, the marker of the answer behind.
        first = text.rfind(user, 0, len(text) - (len("<|assistant|>") if tokenizer is TOKENIZER else 1))
        ends = [text[a:b] for a, b in spans]
        assert ends == [user[a:b] for a, b in free_spans(user)]
        if len(spans):
            assert first <= spans[0, 0]
            assert spans[-1, 1] <= first + len(user)


def test_tokens_of_a_prompt():
    example = TaskExample(system="Is it good?", user="well made", answer="yes", options=("yes", "no"))
    prompt = prompt_tokens(TOKENIZER, example)
    assert prompt.ids.tolist() == prompt_ids(TOKENIZER, example)
    left = TOKENIZER.decode(prompt.ids[~prompt.forced].tolist(), skip_special_tokens=False)
    assert left == "well made"
    # "good?" and "well" are different words, though only a marker stands between them.
    assert len(set(prompt.words[~prompt.forced])) == 2
    assert not set(prompt.words[~prompt.forced]) & set(prompt.words[prompt.forced])


def test_of_a_conversation_the_last_text_of_the_user_may_go():
    now = datetime(2026, 1, 2)
    said = [{"role": "user", "content": "red is warm"}, {"role": "assistant", "content": "so it is"}]
    found = conversation_tokens(TOKENIZER, [*said, {"role": "user", "content": "blue is cold"}], now=now)
    assert [found.text[first:last] for first, last in found.spans] == ["blue is cold"]
    asked = [*said, {"role": "user", "content": "blue is cold"}]
    assert found.ids.tolist() == TOKENIZER.encode_chat(asked, now=now)
    # One turn is a prompt, as it is elsewhere.
    one = conversation_tokens(TOKENIZER, said[:1], now=now)
    alone = prompt_tokens(TOKENIZER, Prompt(user="red is warm"), now=now)
    assert (one.text, one.spans.tolist()) == (alone.text, alone.spans.tolist())
    # Not what the assistant said, nor parts that are no text.
    assert conversation_tokens(TOKENIZER, said, now=now).forced.all()


def test_a_template_that_is_not_understood_forces_everything():
    def tokens(template, user):
        files = dataclasses.replace(tiny_tokenizer(), chat_template=template)
        return prompt_tokens(Tokenizer(files), TaskExample(user=user, answer=""), now=datetime(2031, 1, 1))

    for written in ("{{ m.content | upper }}", "{{ m.content }}|{{ m.content }}"):
        assert tokens(f"{{% for m in messages %}}{written}{{% endfor %}}", "made well").forced.all()
    trims = "{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    prompt = tokens(trims, " made well\n")
    assert prompt.text == "2031[made well]"
    np.testing.assert_array_equal(prompt.spans, [[5, 14]])


@pytest.mark.parametrize("tokenizer", [TOKENIZER, PLAIN])
def test_offsets_cover_the_text(tokenizer):
    text = "hello, wörld 日本\n<|user|>x"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert offsets[0].tolist() == [0, 0]
    assert sorted(set(range(len(text)))) == sorted({i for a, b in offsets for i in range(a, b)})
