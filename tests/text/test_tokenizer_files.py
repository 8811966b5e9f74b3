"""Files of tokenizers: as JSON and back; malformed ones are refused."""

import dataclasses
import json
from typing import Any

import pytest

from jaxllm.errors import CheckpointError
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from tests.text.test_tokenizer import FILES


def test_files_survive_json() -> None:
    for files in (FILES, TokenizerFiles(tokenizer_json="{}"), dataclasses.replace(FILES, chat_template="é")):
        again = TokenizerFiles.from_json(json.loads(json.dumps(files.to_json())))
        assert again == files
        assert hash(again) == hash(files)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_json": 5}, "tokenizer_json must be text, got 5"),
        ({"tokenizer_json": None}, "tokenizer_json must be text"),
        ({"chat_template": ["x"]}, "chat_template must be text or null"),
        ({"special": {"bos_token": 1}}, "special must be a map"),
        ({"special": ["bos_token"]}, "special must be a map"),
        ({"eos_ids": 2}, "eos_ids must be token ids"),
        ({"eos_ids": [-1]}, "eos_ids must be token ids"),
        ({"eos_ids": [True]}, "eos_ids must be token ids"),
        ({"eos_ids": ["2"]}, "eos_ids must be token ids"),
        ({"bos_id": 1 << 31}, "bos_id must be null or a token id"),
        ({"bos_id": 1.0}, "bos_id must be null or a token id"),
        ({"tasks": ["do:"]}, "tasks must be a map from names to texts"),
        ({"tasks": {"do": " "}}, "tasks must be a map from names to texts"),
        ({"task_prefixes": "do:"}, "malformed tokenizer: .*task_prefixes"),
        ({"task_prefixes": [""]}, "tasks must be a map from names to texts"),
        ({"sampling": {"seed": 1}}, "sampling must be a map from some of temperature"),
        ({"sampling": {"top_p": "x"}}, "the model's own sampling cannot be used: top_p"),
        ({"surprise": 1}, "malformed tokenizer: .*surprise"),
    ],
)
def test_malformed_files(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        TokenizerFiles.from_json({**FILES.to_json(), **change})


@pytest.mark.parametrize("data", [None, [], "x", {}, {"chat_template": "x"}])
def test_no_files(data: Any) -> None:
    with pytest.raises(CheckpointError):
        TokenizerFiles.from_json(data)


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"model": 5}', "null", "\0"])
def test_no_tokenizer(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"^malformed tokenizer.json: [^\n]+$"):
        Tokenizer(TokenizerFiles(tokenizer_json=text))
