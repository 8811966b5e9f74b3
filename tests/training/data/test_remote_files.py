"""Texts and conversations at URLs, by fsspec's file system in memory."""

import json
import sys

import fsspec
import pytest

from jaxllm.cli.training_options import _PathOrUrl, given_sources
from jaxllm.errors import ConfigError
from jaxllm.training.data.corpus import Corpus
from jaxllm.training.data.sources import Source


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
