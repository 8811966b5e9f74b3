"""Documents, their split, and the tokenizer: the laws that a repeatable run stands on."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample
from jaxllm.training.data import documents
from jaxllm.training.data.documents import Special, chat_document, held_out_digests, read_texts, text_document
from jaxllm.training.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, PAD, SPECIAL_TOKENS, train_tokenizer

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


def test_a_chat_is_a_prompt_and_an_answer_between_special_tokens():
    example = TaskExample(system="Which?", user="<|user|>", answer="b")
    document = chat_document(example)
    names = [piece.token if isinstance(piece, Special) else piece for piece in document.pieces]
    assert names == [
        "<|system|>", "Which?", "<|end|>", "<|user|>", "<|user|>", "<|end|>", "<|assistant|>", "b", "<|end|>",
    ]  # fmt: skip
    assert names[document.prompt_pieces] == "b"
    assert document.texts == ("Which?", "<|user|>", "b")
    # A text is told from a special token of the same name.
    other = TaskExample(system="Which?", user="", answer="b")
    assert chat_document(other).digest() != document.digest()
    as_text = chat_document(TaskExample(user="1 + 1 =", answer=" 2", form="text"))
    assert as_text.pieces == ("1 + 1 =", " 2", Special(END_OF_TEXT))
    assert as_text.prompt_pieces == 1


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
