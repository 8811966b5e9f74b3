"""Decides whether a tokenizer.json consists of parts whose time and memory are known to be bounded.

Known are the parts that published models use: byte pairs, unigrams and word pieces with the usual normalizers
and splits. Such a tokenizer runs in this process. Any other (unknown regular expressions, compiled character
maps, long chains) runs in a child process (`jaxllm.text.confined_tokenizer`), since its cost is unknown.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MAX_CHAIN = 16
_MAX_WORD = 64
# Longest piece of a unigram model: at each character of a text all pieces that begin there are tried.
_MAX_PIECE = 512
# How many times longer a chain of replacements may make a text.
_MAX_GROWTH = 8
_MAX_ID = 1 << 24

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
# The splits of GPT-2, GPT-4, Llama 3, Qwen, o200k, Tekken and DeepSeek.
KNOWN_EXPRESSIONS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_GAPS}",
        rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_GAPS}",
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_GAPS}",
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_GAPS}",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_GAPS}",
    }
)
# One class of characters, once or repeated: it matches without backtracking.
_ONE_CLASS = re.compile(
    r"(?:\[(?:[^\[\]\\&]|\\.)+\]|\\[sSdDwW]|\\p\{\w+\}|[\w ])(?:\+|\{\d{1,3}(?:,\d{1,3})?\})?"
)


def is_ordinary(tokenizer_json: str) -> bool:
    """Whether a tokenizer.json consists of known parts. False for text that is no tokenizer."""
    try:
        data = json.loads(tokenizer_json)
        return isinstance(data, dict) and all(
            (name not in data and name != "model") or check(data[name]) for name, check in _PARTS.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _chain(parts: Any, key: str) -> Sequence[Mapping[str, Any]]:
    """The parts of a sequence, nested ones flattened; or the only part."""
    if parts is None:
        return ()
    if parts["type"] != "Sequence":
        return (parts,)
    found = [each for part in parts[key] for each in _chain(part, key)]
    if len(found) > _MAX_CHAIN:
        raise ValueError("a long chain")
    return found


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_WORD


def _growth(part: Mapping[str, Any]) -> float:
    """How many times longer a replacement makes a text, infinite where that is not known."""
    pattern = part["pattern"]
    old, new = pattern.get("String"), part["content"]
    if old is None and "Regex" in pattern:
        # A match of one class of characters has at least one character.
        old = "x" if _ONE_CLASS.fullmatch(pattern["Regex"]) else None
    if not (_is_word(old) and _is_word(new) and old):
        return float("inf")
    return max(1.0, len(new.encode()) / len(old.encode()))


def _product(parts: Sequence[Mapping[str, Any]]) -> float:
    product = 1.0
    for part in parts:
        product *= _growth(part) if part["type"] == "Replace" else 1.0
    return product


def _normalizer(value: Any) -> bool:
    parts = _chain(value, "normalizers")
    return _product(parts) <= _MAX_GROWTH and all(
        part["type"] in _NORMALIZERS and (part["type"] != "Prepend" or _is_word(part["prepend"]))
        for part in parts
    )


def _pre_tokenizer(value: Any) -> bool:
    def known(part: Mapping[str, Any]) -> bool:
        if part["type"] == "Split":
            text, expression = part["pattern"].get("String"), part["pattern"].get("Regex")
            if expression is None:
                return _is_word(text) and bool(text)
            return expression in KNOWN_EXPRESSIONS or bool(_ONE_CLASS.fullmatch(expression))
        if part["type"] == "Metaspace":
            return _is_word(part["replacement"]) and len(part["replacement"]) == 1
        return part["type"] in _PRE_TOKENIZERS

    return all(map(known, _chain(value, "pretokenizers")))


def _decoder(value: Any) -> bool:
    def known(part: Mapping[str, Any]) -> bool:
        if part["type"] == "Strip":
            ends = (part["start"], part["stop"])
            return _is_word(part["content"]) and all(type(each) is int and 0 <= each <= 16 for each in ends)
        if part["type"] == "Metaspace":
            return _is_word(part["replacement"]) and len(part["replacement"]) == 1
        words = (part.get(each, "") for each in ("prefix", "suffix"))
        return part["type"] in _DECODERS and all(map(_is_word, words))

    parts = _chain(value, "decoders")
    return _product(parts) <= _MAX_GROWTH and all(map(known, parts))


def _post_processor(value: Any) -> bool:
    def known(part: Mapping[str, Any]) -> bool:
        if part["type"] == "TemplateProcessing":
            tokens = part["special_tokens"].values()
            single = part["single"]
            return (
                len(single) <= _MAX_CHAIN
                and sum("Sequence" in each for each in single) == 1
                and all(each["Sequence"]["id"] == "A" for each in single if "Sequence" in each)
                and all(
                    each["SpecialToken"]["id"] in part["special_tokens"]
                    for each in (*single, *part["pair"])
                    if "SpecialToken" in each
                )
                and len(part["pair"]) <= 2 * _MAX_CHAIN
                and all(len(each["ids"]) == 1 and _is_id(each["ids"][0]) for each in tokens)
            )
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            return all(_is_id(part[each][1]) for each in ("sep", "cls"))
        return part["type"] == "ByteLevel"

    return all(map(known, _chain(value, "processors")))


def _model(value: Any) -> bool:
    kind, vocabulary = value["type"], value["vocab"]
    words = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    if not all(value.get(each) is None or _is_word(value[each]) for each in words):
        return False
    if kind == "Unigram":
        number = value["unk_id"]
        return (
            isinstance(vocabulary, list)
            and bool(vocabulary)
            and all(
                isinstance(piece, str) and 0 < len(piece) <= _MAX_PIECE and type(score) in (int, float)
                for piece, score in vocabulary
            )
            and (number is None or (type(number) is int and 0 <= number < len(vocabulary)))
        )
    if not vocabulary or not all(map(_is_id, vocabulary.values())):
        return False
    if kind == "WordPiece":
        return value["max_input_chars_per_word"] <= 1000 and value["unk_token"] in vocabulary
    if kind == "WordLevel":
        return value["unk_token"] in vocabulary
    unknown = value.get("unk_token")
    if value.get("continuing_subword_prefix"):
        # The library cuts merges by the prefix's length, and panics if one is shorter.
        return False
    return kind == "BPE" and not value.get("dropout") and (unknown is None or unknown in vocabulary)


def _added_tokens(value: Any) -> bool:
    return all(_is_id(each["id"]) and isinstance(each["content"], str) and each["content"] for each in value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ID


_NORMALIZERS = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "BertNormalizer", "ByteLevel", "Nmt"}
    | {"Replace", "Prepend"}
)
_PRE_TOKENIZERS = frozenset(
    {"ByteLevel", "BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Punctuation", "Digits"}
    | {"UnicodeScripts", "CharDelimiterSplit"}
)
_DECODERS = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Replace", "WordPiece", "BPEDecoder"})
_PARTS: Mapping[str, Callable[[Any], bool]] = {
    "normalizer": _normalizer,
    "pre_tokenizer": _pre_tokenizer,
    "decoder": _decoder,
    "post_processor": _post_processor,
    "added_tokens": _added_tokens,
    "model": _model,
}
