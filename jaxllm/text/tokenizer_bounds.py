"""Decides whether a tokenizer.json only consists of well-known parts.

Byte pairs, unigrams and word pieces with the usual normalizers and splits run in this process. All others
(unknown regular expressions, compiled character maps, long chains) run in a child process with limits of time
and memory (`jaxllm.text.tokenizer`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_PARTS, _MAX_WORD, _MAX_NUMBER = 16, 64, 1 << 24
# Maximum length of a unigram model's pieces: at each character of a text all pieces that begin there are
# tried.
_MAX_PIECE = 512
# Maximum growth of a text by all replacements together.
_MAX_GROWTH = 8

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
# Published splits by the first model of each.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_GAPS}"
QWEN2 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_GAPS}"
GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_GAPS}"
)
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_GAPS}"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_GAPS}"
)
KNOWN_EXPRESSIONS = frozenset({GPT2, LLAMA3, QWEN2, GPT4O, _TEKKEN, _DEEPSEEK})
# One class of characters, once or repeated: it matches without backtracking.
_ONE_CLASS = re.compile(
    r"(?:\[(?:[^\[\]\\&]|\\.)+\]|\\[sSdDwW]|\\p\{\w+\}|[\w ])(?:\+|\{\d{1,3}(?:,\d{1,3})?\})?"
)
# Steps of a tokenizer -> the key of a sequence of them, and the known types.
_TYPES = {
    "normalizer": (
        "normalizers",
        "NFC NFD NFKC NFKD Lowercase StripAccents Strip BertNormalizer ByteLevel Nmt Replace Prepend",
    ),
    "pre_tokenizer": (
        "pretokenizers",
        "ByteLevel BertPreTokenizer Whitespace WhitespaceSplit Punctuation Digits UnicodeScripts "
        "CharDelimiterSplit Split Metaspace",
    ),
    "decoder": (
        "decoders",
        "ByteLevel ByteFallback Fuse Replace WordPiece BPEDecoder Strip Metaspace",
    ),
    "post_processor": ("processors", "TemplateProcessing BertProcessing RobertaProcessing ByteLevel"),
}


def is_ordinary(tokenizer_json: str) -> bool:
    """Whether a tokenizer.json consists of known parts. False for other texts."""
    try:
        data = json.loads(tokenizer_json)
        return (
            all(_is_known(data.get(step), *known) for step, known in _TYPES.items())
            and _is_known_model(data["model"])
            and all(_is_id(each["id"]) and each["content"] for each in data.get("added_tokens", ()))
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _is_known(step: Any, key: str, types: str) -> bool:
    parts = [] if step is None else list(_parts(step, key))
    growth = 1.0
    for part in parts:
        if part["type"] == "Replace":
            old = part["pattern"].get("String", "x")
            growth *= max(1.0, len(part["content"].encode()) / len(old.encode()))
    plain = all(part["type"] in types.split() and _is_plain(part) for part in parts)
    return len(parts) <= _MAX_PARTS and growth <= _MAX_GROWTH and plain


def _parts(step: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence, nested ones flattened; or the only part."""
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[key]:
        yield from _parts(each, key)


def _is_plain(value: Any, key: str = "") -> bool:
    """Whether all texts, numbers and lists within a part are short, and its expressions known."""
    if isinstance(value, dict):
        return len(value) <= _MAX_PARTS and all(_is_plain(each, name) for name, each in value.items())
    if isinstance(value, list):
        return len(value) <= _MAX_PARTS and all(_is_plain(each, key) for each in value)
    if isinstance(value, str):
        if key == "Regex":
            return value in KNOWN_EXPRESSIONS or bool(_ONE_CLASS.fullmatch(value))
        return len(value) <= _MAX_WORD and (key != "String" or value != "")
    # `Strip` counts to these for each token.
    return abs(value or 0) <= (_MAX_PARTS if key in ("start", "stop") else _MAX_NUMBER)


def _is_known_model(model: Mapping[str, Any]) -> bool:
    vocabulary = model["vocab"]
    if model["type"] == "Unigram":
        unknown = model["unk_id"]
        short = all(0 < len(piece) <= _MAX_PIECE for piece, _ in vocabulary)
        return short and (unknown is None or 0 <= unknown < len(vocabulary))
    # The library cuts merges by the prefix's length, and panics if one is shorter.
    cut = model["type"] == "BPE" and model.get("continuing_subword_prefix")
    return (
        model["type"] in ("BPE", "WordPiece", "WordLevel")
        and not cut
        and model.get("max_input_chars_per_word", 0) <= 1000
        and all(map(_is_id, vocabulary.values()))
    )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER
