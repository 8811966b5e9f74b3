"""Tokenizers of Hugging Face folders, as published models lay them out."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.checkpoints import tokenizer_folder
from jaxllm.checkpoints.tokenizer_folder import (
    read_tokenizer,
    with_chat_template,
    write_sampling,
    write_tokenizer,
)
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles


def library_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|eot|>"])  # 256, 257, 258
    return tokenizer


TEXT = library_tokenizer().to_str()


def write(folder: Path, **contents: Any) -> Path:
    """Write `name__ext=value` as the file name.ext, in JSON unless it is text."""
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def test_what_the_decoder_of_an_encoder_decoder_begins_with(tmp_path: Path) -> None:
    tasks = {"doing": {"prefix": "do: "}, "undoing": {"prefix": "undo: "}, "other": {}}
    config = {
        "is_encoder_decoder": True, "decoder_start_token_id": 7, "forced_bos_token_id": 3, "prefix": "do: ",
        "task_specific_params": tasks,
    }  # fmt: skip
    generation = {"decoder_start_token_id": 2}
    write(tmp_path, tokenizer__json=TEXT, config__json=config, generation_config__json=generation)
    found = read_tokenizer(tmp_path)
    assert (found.start_ids, found.source_prefix) == ((2, 3), "do: ")
    # A source that names its task has its prefix already.
    assert [found.source_text(each) for each in ("this", "undo: this")] == ["do: this", "undo: this"]
    assert TokenizerFiles.from_json(found.to_json()) == found
    # By its name, unless the source has its prefix already.
    assert [found.source_text(each, "undoing") for each in ("this", "undo: this")] == ["undo: this"] * 2
    with pytest.raises(ConfigError, match="no task 'redoing': there are doing, undoing"):
        found.source_text("this", "redoing")


def test_decoders_without_a_start_token_of_their_own(tmp_path: Path) -> None:
    """Alone they begin with the prompt; behind an encoder with the first token of texts."""
    assert read_tokenizer(write(tmp_path, tokenizer__json=TEXT)) == TokenizerFiles(tokenizer_json=TEXT)
    config = {"is_encoder_decoder": False, "decoder_start_token_id": 7, "prefix": "do: ", "bos_token_id": 7}
    found = read_tokenizer(write(tmp_path, config__json=config))
    assert (found.start_ids, found.source_prefix, found.bos_id) == ((), "", 7)
    assert "start_ids" not in found.to_json()
    config = {"is_encoder_decoder": True, "bos_token_id": 5}
    assert read_tokenizer(write(tmp_path, config__json=config)).start_ids == (5,)


def test_a_whole_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        tokenizer__json=TEXT,
        tokenizer_config__json={
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": "<|eot|>", "lstrip": False},
            "pad_token": None,
            "add_bos_token": True,
            "chat_template": "{{ messages }}",
        },
        special_tokens_map__json={"eos_token": "</s>", "unk_token": {"content": "<unk>"}},
        generation_config__json={"eos_token_id": [260, 258], "bos_token_id": 1},
        config__json={"eos_token_id": 257, "bos_token_id": 2},
    )
    assert read_tokenizer(tmp_path) == TokenizerFiles(
        tokenizer_json=TEXT,
        chat_template="{{ messages }}",
        special={"bos_token": "<s>", "eos_token": "<|eot|>", "unk_token": "<unk>"},
        eos_ids=(260, 258, 257),
        bos_id=256,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
    ],
)  # fmt: skip
def test_the_sampling_that_authors_advise(
    config: dict[str, Any], expected: dict[str, float], tmp_path: Path
) -> None:
    found = read_tokenizer(write(tmp_path, tokenizer__json=TEXT, generation_config__json=config))
    assert dict(found.sampling) == expected
    assert TokenizerFiles.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 20}, {"temperature": 0.0}])
def test_sampling_is_written_as_transformers_reads_it(sampling: dict[str, float], tmp_path: Path) -> None:
    files = TokenizerFiles(tokenizer_json=TEXT, eos_ids=(257, 258), bos_id=256, sampling=sampling)
    write_tokenizer(tmp_path, files)
    write_sampling(tmp_path, files)
    assert (tmp_path / "generation_config.json").exists() is bool(sampling)
    if sampling:
        assert read_tokenizer(tmp_path).sampling == sampling
        transformers = pytest.importorskip("transformers")
        read = transformers.GenerationConfig.from_pretrained(tmp_path)
        assert (read.eos_token_id, read.bos_token_id) == ([257, 258], 256)
        drawn = sampling["temperature"] > 0
        assert (read.do_sample, read.temperature, read.top_k) == (
            (True, 0.6, 20) if drawn else (False, None, None)
        )


@pytest.mark.parametrize(
    ("generation", "config", "named", "expected"),
    [
        ({}, {}, None, ()),
        ({"eos_token_id": None}, {"eos_token_id": [3, 1]}, None, (3, 1)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": [2, 3]}, "</s>", (1, 2, 3, 257)),
        ({"eos_token_id": -1}, {"eos_token_id": 257}, "</s>", (257,)),
    ],
)
def test_ends_of_an_answer(
    tmp_path: Path, generation: Any, config: Any, named: str | None, expected: tuple[int, ...]
) -> None:
    write(
        tmp_path, tokenizer__json=TEXT, generation_config__json=generation, config__json=config,
        tokenizer_config__json={"eos_token": named},
    )  # fmt: skip
    assert read_tokenizer(tmp_path).eos_ids == expected


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"tokenizer_config__json": {"chat_template": NAMED}}, "plain"),
        ({"tokenizer_config__json": {"chat_template": NAMED[:1]}}, "tools"),
        ({"chat_template__json": {"chat_template": "b"}}, "b"),
        ({"tokenizer_config__json": {"chat_template": "a"}, "chat_template__jinja": "c"}, "c"),
    ],
)
def test_chat_templates(tmp_path: Path, contents: dict[str, Any], expected: str) -> None:
    assert read_tokenizer(write(tmp_path, tokenizer__json=TEXT, **contents)).chat_template == expected


def test_named_templates_are_kept_and_one_is_for_tools(tmp_path: Path) -> None:
    calls = "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": calls}, NAMED[1]]
    write(tmp_path, tokenizer__json=TEXT, tokenizer_config__json={"chat_template": named})
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("documents")
    files = read_tokenizer(tmp_path)
    assert (files.chat_template, dict(files.templates)) == ("plain", {"tool_use": calls, "rag": "documents"})
    assert TokenizerFiles.from_json(files.to_json()) == files
    tokenizer, tool = Tokenizer(files), {"type": "function", "function": {"name": "find"}}
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat, tools=[tool]) == "findhi"
    assert tokenizer.render_chat(chat) == "plain"
    write_tokenizer(tmp_path / "copy", files)
    assert read_tokenizer(tmp_path / "copy").templates == files.templates
    own = tmp_path / "own.jinja"
    own.write_text("own")
    assert with_chat_template(tokenizer, own).render_chat(chat, tools=[tool]) == "own"
    for text in ("{% if", "x" * (1 << 21)):
        own.write_text(text)
        with pytest.raises(ConfigError, match=r"own\.jinja cannot be read"):
            with_chat_template(tokenizer, own)
    (more / "a b.jinja").write_text("x")
    with pytest.raises(CheckpointError, match="one named 'a b'"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"tokenizer__json": "{"}, "malformed tokenizer.json"),
        ({"generation_config__json": {"temperature": "hot"}}, r"generation_config\.json: .*correct the file"),
        ({"config__json": "[" * 100_000}, "config.json cannot be read as JSON"),
        ({"config__json": {"eos_token_id": "2"}}, "eos_token_id must be a token id or a list, got '2'"),
        ({"config__json": {"eos_token_id": 1 << 40}}, "eos_ids must be token ids"),
        ({"tokenizer_config__json": {"eos_token": 5}}, "eos_token must be text or have a content, got 5"),
        (
            {"tokenizer_config__json": {"chat_template": [NAMED[0], {"name": "b", "template": "x"}]}},
            r"\['b', 'tool_use'\] and none named 'default'",
        ),
    ],
)
def test_malformed_folders(tmp_path: Path, contents: dict[str, Any], reason: str) -> None:
    write(tmp_path, **{"tokenizer__json": TEXT, **contents})
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_tokenizer(tmp_path / "absent")
    write(tmp_path, tokenizer__json=TEXT)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(
        CheckpointError, match=r"config.json cannot be read .a pipe or device, not a regular file"
    ):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr(tokenizer_folder, "MAX_FILE_BYTES", len(TEXT.encode()) - 1)
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read .larger than"):
        read_tokenizer(tmp_path)


# Folders without tokenizer.json.


def write_vocabulary(folder: Path) -> Path:
    """GPT-2's files: what is left of a tokenizer saved by an old library."""
    library_tokenizer().model.save(str(folder))
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    vocabulary["<|endoftext|>"] = len(vocabulary)
    return write(folder, vocab__json=vocabulary, config__json={"model_type": "gpt2"})


def test_a_vocabulary_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files = read_tokenizer(write_vocabulary(tmp_path))
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("héllo") == library_tokenizer().encode("héllo").ids
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert files.special["eos_token"] == "<|endoftext|>"
    assert files.eos_ids == (256,)


def test_vocabularies_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any transformers would make an empty tokenizer from the model type alone."""
    pytest.importorskip("transformers")
    write(tmp_path, config__json={"model_type": "llama"})
    with pytest.raises(CheckpointError, match=r"no tokenizer.json, nor a vocabulary"):
        read_tokenizer(tmp_path)
    write(write_vocabulary(tmp_path), vocab__json="{broken")
    with pytest.raises(CheckpointError, match=r"cannot convert the tokenizer in [^\n]*$"):
        read_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"run: pip install 'jaxllm\[convert\]'"):
        read_tokenizer(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_vocabulary(tmp_path)
    ran = tmp_path / "ran"
    mapped = {"auto_map": {"AutoTokenizer": ["custom.Custom"] * 2}, "tokenizer_class": "Custom"}
    code = f"open({str(ran)!r}, 'w')\nclass Custom: pass\n"
    write(tmp_path, custom__py=code, tokenizer_config__json=mapped)
    with pytest.raises(CheckpointError, match="cannot convert"):
        read_tokenizer(tmp_path)
    assert read_tokenizer(write(tmp_path, tokenizer__json=TEXT)).tokenizer_json == TEXT
    assert not ran.exists()


# Writing.

FILES = TokenizerFiles(
    tokenizer_json=TEXT,
    chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}é\r\n{% endfor %}",
    special={"bos_token": "<s>", "eos_token": "</s>"},
    eos_ids=(257,),
    bos_id=256,
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "new/folder", FILES)
    assert read_tokenizer(tmp_path / "new/folder") == FILES
    # A template of an earlier model is removed.
    write_tokenizer(tmp_path / "new/folder", dataclasses.replace(FILES, chat_template=None))
    assert read_tokenizer(tmp_path / "new/folder").chat_template is None


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, FILES)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = Tokenizer(FILES)
    assert peer.encode("héllo  世") == tokenizer.encode("héllo  世")
    assert (peer.bos_token_id, peer.eos_token_id) == (256, 257)
    chat = [{"role": "user", "content": "Hi"}]
    assert peer.apply_chat_template(chat, tokenize=False) == tokenizer.render_chat(chat)
