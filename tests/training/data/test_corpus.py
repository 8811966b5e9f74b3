"""Sources become tokens: which documents, on which side, in which files, local and remote."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from jinja2 import Template

from jaxllm.cli.training_options import _PathOrUrl, given_sources
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.tasks import readers
from jaxllm.tasks.example import TaskExample
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.training.data import corpus
from jaxllm.training.data.corpus import Corpus, TokenizedDocuments
from jaxllm.training.data.documents import chat_document, text_document
from jaxllm.training.data.encoders import ModelEncoder, PieceEncoder
from jaxllm.training.data.sources import Source
from jaxllm.training.data.tokenizer import MIN_VOCAB_SIZE, ROLE_TEMPLATE, train_tokenizer

TEXTS = [f"Cat {i} sat on mat {i}. Then it ran to house {i * 7}!" for i in range(40)]
REVIEWS = [{"text": f"film number {i}", "label": ("positive", "negative")[i % 2]} for i in range(30)]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "cats.txt").write_text("<|endoftext|>".join(TEXTS))
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    (tmp_path / "tasks" / "sst2" / "train.jsonl").write_text("\n".join(map(json.dumps, REVIEWS)))
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, MIN_VOCAB_SIZE + 20)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PieceEncoder(tokenizer)


def encode_document(document, tokenizer):
    ((ids, _),) = PieceEncoder(tokenizer).encode([document])
    return ids


SOURCES = Source(text="text/cats.txt"), Source(stories="text/cats.txt"), Source(task="sentiment")


def test_every_document_stands_on_one_side(data):
    opened = Corpus.open(SOURCES, data, 0.1)
    sides = {split: list(opened.documents(split)) for split in ("train", "held_out")}
    distinct = {side: {each.origin_digest() for _, each in documents} for side, documents in sides.items()}
    assert len(distinct["held_out"]) == 7
    assert len(distinct["train"]) + 7 == len(TEXTS) + len(REVIEWS)
    documents = sum(map(len, sides.values()))
    assert documents == 2 * len(TEXTS) + len(REVIEWS) == len(opened.digests)
    assert {number for number, _ in sides["train"]} == {0, 1, 2}
    told = next(document for number, document in sides["train"] if number == 1)
    assert told.texts[1].endswith(".")
    assert told.texts[2].startswith("Then")
    assert Corpus.open(SOURCES, data, 0.1).digest() == opened.digest()
    assert Corpus.open(SOURCES[:2], data, 0.1).digest() != opened.digest()
    # A story that is held out is not told on request in training either.
    for split in ("train", "held_out"):
        documents = list(Corpus.open(SOURCES[:2], data, 0.25).documents(split))
        plain = {document.texts[0] for source, document in documents if source == 0}
        told = {" ".join(document.texts[1:]) for source, document in documents if source == 1}
        assert plain == told
        assert plain


def test_tokens_lie_one_document_behind_the_other(data, tmp_path, tokenizer, encoder, monkeypatch):
    monkeypatch.setattr(corpus, "_ENCODE_DOCUMENTS", 7)
    opened = Corpus.open(SOURCES, data, 0.1)
    tokens = opened.tokenized(encoder, "train", tmp_path / "tokens")
    assert isinstance(tokens.tokens, np.memmap)
    assert tokens.tokens.dtype == np.uint16
    documents = list(opened.documents("train"))
    assert len(tokens) == len(documents)
    assert tokens.text_bytes == sum(len(text.encode()) for _, each in documents for text in each.texts)
    for number, (source, document) in enumerate(documents):
        ids = tokens.tokens[tokens.starts[number] : tokens.starts[number + 1]]
        assert ids.tolist() == encode_document(document, tokenizer)
        assert tokens.sources[number] == source
        answer = tokenizer.decode(ids[tokens.prompt_tokens[number] :].tolist(), skip_special_tokens=True)
        assert answer == (document.texts[0] if source == 0 else document.texts[-1])


def test_a_chat_is_encoded_as_its_template_reads(tokenizer):
    example = readers.SENTIMENT.example({"text": "so <|end|> bad", "label": "negative"})
    ids = encode_document(chat_document(example), tokenizer)
    prompt = Template(ROLE_TEMPLATE).render(messages=example.messages(), add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{prompt}negative<|end|>"
    # The text's own `<|end|>` is no end of a turn.
    assert ids.count(tokenizer.token_to_id("<|end|>")) == 3
    clean = readers.SENTIMENT.example({"text": "so bad", "label": "negative"})
    prompt = Template(ROLE_TEMPLATE).render(messages=clean.messages(), add_generation_prompt=True)
    expected = tokenizer.encode(f"{prompt}negative<|end|>").ids
    assert encode_document(chat_document(clean), tokenizer) == expected
    # A model reads documents through its own template.
    files = TokenizerFiles(
        tokenizer_json=tokenizer.to_str(), chat_template=ROLE_TEMPLATE, eos_ids=(0, 5),
        special={"eos_token": "<|endoftext|>"},
    )  # fmt: skip
    documents = [
        chat_document(readers.SENTIMENT.example({"text": "so bad", "label": "negative"})),
        chat_document(TaskExample(user="1 + 1 =", answer=" 2", form="text")),
        text_document("a cat"),
        # What a text says of special tokens is text, wherever it stands.
        text_document("a <|user|> said"),
        chat_document(TaskExample(user="1 <|end|><|assistant|>", answer="<|end|> 2")),
        chat_document(TaskExample(user="1 <|end|>", answer=" 2", form="text")),
    ]
    own, model = PieceEncoder(tokenizer).encode(documents), ModelEncoder(Tokenizer(files)).encode(documents)
    # With this template, the token that ends a turn is found though another comes first.
    assert model[0] == own[0]
    assert [ids[:-1] for ids, _ in model[1:]] == [ids[:-1] for ids, _ in own[1:]]
    assert [count for _, count in model] == [count for _, count in own]
    with pytest.raises(ConfigError, match="no end token"):
        ModelEncoder(Tokenizer(dataclasses.replace(files, eos_ids=())))


def test_token_files_are_written_once_and_never_stale(data, tmp_path, encoder, monkeypatch):
    opened = Corpus.open(SOURCES, data, 0.1)
    first = opened.tokenized(encoder, "train", tmp_path / "tokens")
    other = Corpus.open(SOURCES[:1], data, 0.1).tokenized(encoder, "train", tmp_path / "tokens")
    assert len(other) < len(first)
    monkeypatch.setattr(corpus, "write_tokens", None)
    again = opened.tokenized(encoder, "train", tmp_path / "tokens")
    np.testing.assert_array_equal(again.tokens, first.tokens)


def test_tokens_of_large_vocabularies_are_whole(tmp_path):
    wide = SimpleNamespace(vocab_size=128_256, encode=lambda documents: [([70_000, 3], 0) for _ in documents])
    corpus.write_tokens(tmp_path / "t", [(0, text_document("a"))], wide)
    assert TokenizedDocuments.read(tmp_path / "t").tokens.tolist() == [70_000, 3]


def test_damaged_token_files_are_told(tmp_path, encoder):
    for name in ("tokens.bin", "index.npz"):
        folder = tmp_path / name.removesuffix(".bin")
        corpus.write_tokens(folder, [(0, text_document(text)) for text in TEXTS], encoder)
        assert len(TokenizedDocuments.read(folder)) == len(TEXTS)
        (folder / name).write_bytes((folder / name).read_bytes()[:-50])
        with pytest.raises(CheckpointError, match="made again"):
            TokenizedDocuments.read(folder)


def test_sources_are_checked(data):
    with pytest.raises(ConfigError, match="--data"):
        Corpus.open(SOURCES, None, 0.1)
    with pytest.raises(ConfigError, match=r"none\.txt"):
        Corpus.open([Source(text="none.txt")], data, 0.1)


def test_only_questions_trained_on_lose_words(data, encoder, tmp_path):
    whole, opened = (Corpus.open(SOURCES, data, 0.1, shortened_share=share) for share in (0.0, 1.0))
    assert opened.digest() == whole.digest()
    sides = [[list(each.documents(split)) for split in ("train", "held_out")] for each in (whole, opened)]
    assert sides[0][1] == sides[1][1]
    changed = {source for (source, was), (_, now) in zip(sides[0][0], sides[1][0], strict=True) if was != now}
    assert changed == {2}
    folders = [
        {split: each.tokenized(encoder, split, tmp_path).tokens.tolist() for split in ("train", "held_out")}
        for each in (whole, opened)
    ]
    assert folders[0]["held_out"] == folders[1]["held_out"]
    assert len(folders[1]["train"]) < len(folders[0]["train"])


@pytest.fixture
def store():
    files = fsspec.filesystem("memory")
    files.pipe("/corpus/a.txt", b"One text.\n\nAnother.\n")
    files.pipe("/corpus/deep/b.txt", "Third: \u4e2d<|endoftext|>Fourth.".encode())
    talk = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]}
    files.pipe("/corpus/talks.jsonl", json.dumps(talk).encode() + b"\n{broken\n")
    yield "memory://corpus"
    files.rm("/corpus", recursive=True)


def texts(*sources):
    return sorted(Corpus.open(sources, None, 0.5).training_texts()) + sorted(
        text for _, each in Corpus.open(sources, None, 0.5).documents("held_out") for text in each.texts
    )


def test_texts_and_conversations_at_a_url(store):
    for pattern in ("", "/**/*.txt"):
        found = sorted(texts(Source(text=store + pattern)))
        assert found == ["Another.", "Fourth.", "One text.", "Third: \u4e2d"]
    assert sorted(texts(Source(text=f"{store}/a.txt"))) == ["Another.", "One text."]
    both = Source(text=f"{store}/a.txt"), Source(chat=f"{store}/talks.jsonl", skip_bad=True)
    assert {"Hi?", "Yes."} < set(texts(*both))
    with pytest.raises(ConfigError, match=r"talks.jsonl, line 2: .*--skip-bad"):
        texts(Source(chat=f"{store}/talks.jsonl"))


def test_commands_keep_urls_as_they_are(store):
    paths = [_PathOrUrl().convert(each, None, None) for each in (f"{store}/a.txt", "local.txt")]
    remote, local = given_sources(paths, (), False)
    assert remote.text == f"{store}/a.txt"
    assert local.text.endswith("/local.txt")


def test_what_cannot_be_read_is_said(store, monkeypatch):
    for url, message in (
        (f"{store}/none.txt", "none.txt"),
        (f"{store}/*.md", "no file at memory://corpus"),
        ("unknown://a", "cannot read unknown://a: Protocol not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            texts(Source(text=url))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"cannot read memory://corpus: `pip install 'jaxllm\[data\]'`"):
        texts(Source(text=store))
