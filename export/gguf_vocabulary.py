"""Translates a tokenizer into the metadata of a GGUF file: byte-level BPE, or SentencePiece's with byte
fallback.

Inverse of `jaxllm/checkpoints/gguf_tokenizer.py`, which reads each written file again for comparison.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxllm.checkpoints.gguf_tokenizer import split_name
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def vocabulary_keys(files: TokenizerFiles, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, without the prefix `tokenizer.ggml.` but for the chat template.

    Args:
      files: files of the tokenizer.
      vocab_size: number of rows of the embedding; missing tokens are named as unused.

    Raises:
      ConfigError: llama.cpp has no tokenizer of this kind.
    """
    data = json.loads(files.tokenizer_json)
    model = data["model"]
    if model.get("type") != "BPE":
        raise _unknown(f"a model of the type {model.get('type')!r:.40}")
    added = {each["id"]: each for each in data.get("added_tokens") or ()}
    tokens = {at: token for token, at in model["vocab"].items()} | {
        at: a["content"] for at, a in added.items()
    }
    if max(tokens, default=0) >= vocab_size:
        raise ConfigError(
            f"the tokenizer has tokens up to {max(tokens)}, the model's embedding {vocab_size} rows; GGUF "
            "has one list of both: export it as hf"
        )
    names = [tokens.get(at, f"[unused{at}]") for at in range(vocab_size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    types = [_kind(at, tokens, added, model) for at in range(vocab_size)]
    keys: dict[str, Any] = {"tokens": names, "token_type": types}
    if model.get("byte_fallback"):
        # The order of merges replaces SentencePiece's scores.
        rank = {merge.replace(" ", ""): -float(at) for at, merge in reversed(list(enumerate(merges)))}
        keys |= {
            "model": "llama",
            "scores": [rank.get(name, -1e6) for name in names],
            "add_space_prefix": _prepends(data.get("normalizer")),
        }
    else:
        normalizer = (data.get("normalizer") or {}).get("type")
        if normalizer not in (None, "NFC"):
            raise _unknown(f"the normalizer {normalizer}")
        keys |= {"model": "gpt2", "pre": split_name(data.get("pre_tokenizer")), "merges": merges}
        if keys["pre"] is None:
            raise _unknown("a rule of its own by which texts are split")
    keys |= _named_ids(files, tokens)
    return {name: value for name, value in keys.items() if value is not None}


def _kind(at: int, tokens: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    token = tokens.get(at)
    if token is None:
        return _UNUSED
    if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
        return _BYTE
    if token == model.get("unk_token"):
        return _UNKNOWN
    return _NORMAL if at not in added else _CONTROL if added[at]["special"] else _USER


def _prepends(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text."""
    each = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    return any(part["type"] == "Prepend" for part in each)


def _named_ids(files: TokenizerFiles, tokens: Mapping[int, str]) -> dict[str, Any]:
    if len(files.eos_ids) > len(_ENDS):
        raise _unknown(f"{len(files.eos_ids)} tokens that end an answer, more than {len(_ENDS)}")
    at = {token: number for number, token in tokens.items()}
    keys: dict[str, Any] = {
        "bos_token_id": files.bos_id,
        "add_bos_token": Tokenizer(files).adds_bos,
        "add_eos_token": False,
        "unknown_token_id": at.get(files.special.get("unk_token", "")),
        "padding_token_id": at.get(files.special.get("pad_token", "")),
        "chat_template": files.chat_template,
    }
    return keys | dict(zip(_ENDS, files.eos_ids, strict=False))


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer has {what}, which llama.cpp does not know by a name; export it as hf, and convert "
        "that by llama.cpp's own converter"
    )
