"""Questions that lose words, for a recovery to hear shorter prompts."""

import dataclasses

import pytest

from jaxllm.tasks.example import TaskExample
from jaxllm.training.data.documents import (
    LEAST_SHARE,
    chat_document,
    shortened_document,
    text_document,
    with_fewer_words,
)

OPTIONS = (" yes", " no")


def question(user: str, **changes) -> TaskExample:
    return TaskExample(user=user, answer=" yes", system="Is it so?", options=OPTIONS, **changes)


def some(count: int = 200) -> list[TaskExample]:
    return [question(f"the number {place} is one that nobody knows by heart yet") for place in range(count)]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_about_a_share_of_the_words_stays_in_order(share):
    kept = 0
    for example in some():
        words, left = example.user.split(), with_fewer_words(example, share).user.split()
        kept += len(left) / len(words)
        rest = iter(words)
        assert left
        assert all(word in rest for word in left)
    assert abs(kept / 200 - share) < 0.05


def test_all_words_and_none_of_the_rest_stay_at_the_ends():
    (example,) = some(1)
    assert with_fewer_words(example, 1.0) == example
    last = with_fewer_words(example, 0.0)
    assert last.user.strip() in example.user.split()
    assert dataclasses.replace(last, user=example.user) == example


def test_what_must_stay_does():
    user = "Screen: a red button and some text\nGoal: open the page of settings\nA) press it\nB) go back"
    left = with_fewer_words(question(user), 0.0).user
    assert left == "Screen:\nGoal: open the page of settings\nA) press it\nB) go back"


def test_the_asked_share_of_questions_is_shortened_the_same_each_time():
    documents = [chat_document(example) for example in some()]
    heard = [shortened_document(each, 0.5) for each in documents]
    changed = [was != now for was, now in zip(documents, heard, strict=True)]
    assert 70 < sum(changed) < 130
    assert heard == [shortened_document(each, 0.5) for each in documents]
    lengths = [len(each.example.user.split()) for each, new in zip(heard, changed, strict=True) if new]
    whole = len(documents[0].example.user.split())
    assert min(lengths) < whole / 2 < max(lengths)
    assert sum(lengths) / len(lengths) > LEAST_SHARE * whole


def test_documents_without_options_stay_as_they_are():
    free = TaskExample(user="say this in a shorter way", answer=" shorter")
    for document in (chat_document(free), text_document("some text"), chat_document(some(1)[0])):
        share = 0.0 if document.example and document.example.options else 1.0
        assert shortened_document(document, share) is document
