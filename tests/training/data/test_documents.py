"""Documents, their digests and split, chats without their last answers, and the tokenizer."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.config import RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.quant import quantize
from jaxllm.tasks.example import TaskExample
from jaxllm.training.data import documents
from jaxllm.training.data.documents import (
    LEAST_SHARE,
    chat_document,
    held_out_digests,
    model_digest,
    read_texts,
    shortened_document,
    text_document,
    with_fewer_words,
)
from jaxllm.training.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, PAD, SPECIAL_TOKENS, train_tokenizer
from tests.tiny import TINY

TEXTS = [f"The {i}th cat saw {i * 37} birds, café №{i}." for i in range(60)]


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ("a\nb\n<|endoftext|>\n c \n\nd<|endoftext|>\n", ["a\nb", "c \n\nd"]),
        ("a\nb\n\n  \nc\r\n \r\nd", ["a\nb", "c", "d"]),
        ("one\nwhole", ["one\nwhole"]),
        ("<|endoftext|>", []),
        (" \n\n", []),
    ],
)
@pytest.mark.parametrize("characters", [1 << 20, 5, 14])
def test_a_text_splits_at_its_marker_or_else_at_blank_lines(tmp_path, monkeypatch, text, texts, characters):
    # However few characters are read at once, no marker falls between two reads.
    monkeypatch.setattr(documents, "_READ_CHARACTERS", characters)
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert list(read_texts(path)) == texts


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "2.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"2\.txt as UTF-8"):
        list(read_texts(path))
    with pytest.raises(ConfigError, match=r"none\.txt"):
        list(read_texts(tmp_path / "none.txt"))


@pytest.mark.parametrize("text", ["aaaa\nbbbb\ncccc", "aaaaaaaaaaaaa<|endoftext|>b"])
def test_a_document_without_an_end_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARACTERS", 10)
    monkeypatch.setattr(documents, "_READ_CHARACTERS", 4)
    path = tmp_path / "text.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="more than 10 characters"):
        list(read_texts(path))
    # Builtin texts need no file.
    texts = documents.builtin_texts()
    assert len(texts) > 50
    assert sum(map(len, texts)) > 200_000


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.999])
def test_split_is_by_content_alone(share):
    digests = [text_document(text).digest() for text in TEXTS]
    held_out = held_out_digests(digests, share)
    assert 0 < len(held_out) < len(TEXTS)
    # Neither the order nor copies move a document to the other side.
    assert held_out_digests(digests[::-1] + digests, share) == held_out
    with pytest.raises(ConfigError, match="two distinct documents"):
        held_out_digests([b"same", b"same"], 0.5)


def test_a_text_is_told_from_a_special_token_of_the_same_name():
    document, other = (
        chat_document(TaskExample(system="Which?", user=user, answer="b")) for user in ("<|user|>", "")
    )
    assert document.texts == ("Which?", "<|user|>", "b")
    assert other.digest() != document.digest()


def test_tokenizer_is_deterministic_reversible_and_splits_digits():
    tokenizer = train_tokenizer(TEXTS, MIN_VOCAB_SIZE + 20)
    assert train_tokenizer(TEXTS, MIN_VOCAB_SIZE + 20).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == MIN_VOCAB_SIZE + 20
    assert (tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(PAD)) == (0, 1)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert "<|ttft:20|>" in SPECIAL_TOKENS
    assert "<|tpot:100|>" in SPECIAL_TOKENS
    for text in ("cat", " 12 cats\n\n", "鷗\x00🙂 ", "1999"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1999").tokens == ["1", "9", "9", "9"]


def test_tokenizer_refuses_a_vocabulary_it_cannot_fill():
    with pytest.raises(ConfigError, match=f"at least {MIN_VOCAB_SIZE}"):
        train_tokenizer(TEXTS, MIN_VOCAB_SIZE - 1)
    with pytest.raises(ConfigError, match="more text"):
        train_tokenizer(["ab"], 400)


UP = np.arange(32, dtype=np.float32).reshape(4, 8)
PARAMS = {"up": UP, "down": UP + 1}


@dataclasses.dataclass(frozen=True)
class Young:
    size: int
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class Old:
    size: int
    bias: bool = False
    gated: bool = True


def test_it_differs_where_models_do():
    half = dataclasses.replace(TINY, rope=RopeConfig(dim=8))
    others = [
        model_digest(TINY),
        model_digest(half, PARAMS),
        model_digest(TINY, {**PARAMS, "down": UP}),
        model_digest(TINY, {"up": UP + 1, "down": UP}),
        model_digest(TINY, PARAMS, {"up": UP}),
        model_digest({"model": TINY, "levels": (50, 100)}, PARAMS),
        model_digest(TINY, {**PARAMS, "up": quantize(UP, bits=8, axis=-1)}),
    ]
    assert len({model_digest(TINY, PARAMS), *others}) == 8


def test_it_is_the_same_however_a_model_is_held():
    once = model_digest(TINY, PARAMS)
    turned = {name: np.asfortranarray(PARAMS[name]) for name in sorted(PARAMS)}
    assert model_digest(dataclasses.replace(TINY), turned) == once
    assert model_digest(TINY, jax.tree.map(jax.numpy.asarray, PARAMS)) == once


def test_a_field_that_is_added_later_changes_no_name():
    assert model_digest(Young(3)) == model_digest(Old(3)) != model_digest(Old(3, gated=False))
    assert model_digest(Young(3, bias=True)) not in (model_digest(Young(3)), model_digest(Young(4)))


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
