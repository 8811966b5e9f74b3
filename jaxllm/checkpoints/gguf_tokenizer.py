"""Rebuilds a tokenizer from a GGUF file's metadata as a `tokenizer.json`.

llama.cpp stores the vocabulary, and merges (byte pairs) or scores (SentencePiece). For byte pairs the rule
for splitting texts is a name; unknown names are refused, because another split gives other tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.checkpoints.gguf_file import GgufArray, GgufFile
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.config_reader import ConfigReader
from jaxllm.text.tokenizer import TokenizerFiles, open_tokenizer
from jaxllm.text.tokenizer_bounds import GPT2, GPT4O, LLAMA3, QWEN2

_MAX_TOKENS = 1 << 21
# llama.cpp's keys of the recommended sampling (see `TokenizerFiles.sampling`).
SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
_NAMED_TEMPLATE = "chat_template."
# By llama.cpp's name: whether each digit is split off first, and the expression.
_SPLITS: dict[str, tuple[bool, str]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "default"), (False, GPT2)),
    **dict.fromkeys(("smollm", "refact", "starcoder"), (True, GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (False, LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (False, QWEN2)),
    "gpt-4o": (False, GPT4O),
}
# Splits for which llama.cpp adds the first token of a text by default.
_BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def read_gguf_tokenizer(file: GgufFile, vocab_size: int) -> TokenizerFiles:
    """The tokenizer of a GGUF file.

    Raises:
      CheckpointError: the file has no tokenizer, a malformed one, or one of an unsupported kind.
    """
    try:
        return _read(_Reader(file), file, vocab_size)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def _read(of: "_Reader", file: GgufFile, vocab_size: int) -> TokenizerFiles:
    kind = of.optional_text("model")
    if kind is None:
        raise CheckpointError("it has no tokenizer; take a file with one, or the model's folder")
    tokens, types = of.tokens(vocab_size)
    if kind == "gpt2":
        data, begins = _byte_pairs(of, tokens)
    elif kind == "llama":
        data, begins = _sentence_pieces(of, tokens, types), True
    else:
        raise CheckpointError(
            f"its tokenizer is of the kind {kind!r:.80}; jaxllm reads gpt2 (byte pairs) and llama "
            "(SentencePiece): take the model's Hugging Face folder"
        )
    begin, end = of.token_id("bos_token_id", tokens), of.token_id("eos_token_id", tokens)
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    added: dict[str, Any] = {}
    if of.flag("add_bos_token", begins) and begin is not None:
        first = tokens[begin]
        single.insert(0, {"SpecialToken": {"id": first, "type_id": 0}})
        added[first] = {"id": first, "ids": [begin], "tokens": [first]}
    data |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": at,
                "content": token,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": types[at] != _USER,
            }
            for at, token in enumerate(tokens)
            if types[at] in (_UNKNOWN, _CONTROL, _USER) and token
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": added,
        },
    }
    ends = [of.token_id(key, tokens) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    unknown, padding = (of.token_id(f"{name}_token_id", tokens) for name in ("unknown", "padding"))
    named = {"bos_token": begin, "eos_token": end, "unk_token": unknown, "pad_token": padding}
    special = {name: tokens[number] for name, number in named.items() if number is not None}
    sampling = {name: file.metadata[key] for name, key in SAMPLING_KEYS.items() if key in file.metadata}
    if type(sampling.get("top_k")) is int:
        sampling["top_k"] = max(0, sampling["top_k"])
    text = json.dumps(data, ensure_ascii=False)
    # What the library makes of the text has its own copy of all: both would be more than a small model.
    del data, tokens, types
    open_tokenizer(text)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=of.optional_text("chat_template"),
        templates=of.templates(),
        special=special,
        eos_ids=tuple(dict.fromkeys(number for number in ends if number is not None)),
        bos_id=begin,
        # Checked by `TokenizerFiles`. Stored in 32 bits: further digits are noise.
        sampling={
            name: float(f"{each:.7g}") if isinstance(each, float) else each for name, each in sampling.items()
        },
    )


def split_name(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """llama.cpp's name of the rule by which a `tokenizer.json` of byte pairs splits texts; None if it has
    none."""
    parts = [pre_tokenizer or {}]
    if parts[0].get("type") == "Sequence":
        parts = list(parts[0]["pretokenizers"])
    kinds = [each.get("type") for each in parts]
    digits = kinds[:1] == ["Digits"] and parts[0].get("individual_digits") is True
    rest = parts[1:] if digits else parts
    if [each.get("type") for each in rest] == ["ByteLevel"] and rest[0].get("use_regex", True):
        expression = GPT2
    elif [each.get("type") for each in rest] == ["Split", "ByteLevel"] and not rest[1].get("use_regex", True):
        expression = rest[0].get("pattern", {}).get("Regex")
    else:
        return None
    if rest[-1].get("add_prefix_space", True):
        return None
    # The first of all equivalent names.
    return next((name for name, known in _SPLITS.items() if known == (digits, expression)), None)


class _Reader(ConfigReader):
    """Looks up keys of the tokenizer, without `tokenizer.ggml.` or `tokenizer.` before them."""

    def __init__(self, file: GgufFile) -> None:
        keys = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items()}
        self._keys = {key.removeprefix("ggml."): value for key, value in keys.items()}
        super().__init__(self._keys, "tokenizer.ggml.")

    def token_id(self, key: str, tokens: Sequence[str]) -> int | None:
        value = self.optional_integer(key)
        if value is not None and not 0 <= value < len(tokens):
            raise CheckpointError(f"{key} must be a token id below {len(tokens)}, got {value}")
        return value

    def templates(self) -> dict[str, str]:
        """Further chat templates, by name."""
        keys = (key for key in self._keys if key.startswith(_NAMED_TEMPLATE))
        return {key.removeprefix(_NAMED_TEMPLATE): self.text(key, "") for key in keys}

    def array(self, key: str, most: int, count: int | None = None) -> GgufArray:
        value = self._keys.get(key)
        if not isinstance(value, GgufArray) or value.count > most or count not in (None, value.count):
            wanted = f"at most {most}" if count is None else str(count)
            raise CheckpointError(f"{key} must be an array of {wanted} entries, got {value!r:.80}")
        return value

    def tokens(self, vocab_size: int) -> tuple[list[str], list[int]]:
        """Tokens and their types, which default to normal."""
        tokens = self.array("tokens", min(vocab_size, _MAX_TOKENS)).texts()
        if not tokens or len(set(tokens)) != len(tokens):
            raise CheckpointError("tokens must be distinct texts; download the file again")
        if "token_type" not in self.keys():
            return tokens, [_NORMAL] * len(tokens)
        types = self.array("token_type", _MAX_TOKENS, len(tokens)).numbers()
        if not set(types) <= set(range(7)):
            raise CheckpointError("token_type must be numbers from 0 to 6; download the file again")
        return tokens, types


def _byte_pairs(of: _Reader, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    name = of.optional_text("pre") or "default"
    if name not in _SPLITS:
        raise CheckpointError(
            f"it splits texts by {name!r:.80}, which is not supported; supported are {', '.join(_SPLITS)}: "
            "take the model's Hugging Face folder"
        )
    digits, expression = _SPLITS[name]
    # Merges share the tokens' strings: there are hundreds of thousands of them.
    known = {each: each for each in tokens}
    merges: list[tuple[str, ...]] = []
    for each in of.array("merges", 4 * _MAX_TOKENS).texts():
        pair = each.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known.keys():
            raise CheckpointError("it has merges of tokens that it does not have; download it again")
        merges.append((known[pair[0]], known[pair[1]]))
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    first = [{"type": "Digits", "individual_digits": True}] if digits else []
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*first, split, level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        # In Llama 3 a word that is a token is that token, regardless of merges.
        "model": _model(tokens, merges, ignore_merges=expression == LLAMA3),
    }, name in _BEGIN_BY_DEFAULT


def _sentence_pieces(of: _Reader, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    scores = of.array("scores", _MAX_TOKENS, len(tokens)).numbers()
    if not all(isinstance(each, float) for each in scores):
        raise CheckpointError("scores of tokens must be numbers with fractions; download the file again")
    prefix = of.flag("add_space_prefix", True)
    unknown = of.token_id("unknown_token_id", tokens)
    if unknown is None:
        unknown = next((at for at, each in enumerate(types) if each == _UNKNOWN), None)
    # Merges that give SentencePiece's tokens: of all pairs of tokens that make a token, those with the
    # highest score first.
    joined = {token: at for at, token in enumerate(tokens) if types[at] in (_NORMAL, _USER, _UNUSED)}
    found = []
    for token, at in joined.items():
        if len(token) > 512:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(joined[left], joined[right]) for left, right in pairs if left in joined and right in joined]
        found += [(-scores[at], at, left, right) for left, right in sorted(known)]
    found.sort(key=lambda each: each[0])
    merges = [(str(tokens[left]), str(tokens[right])) for _, _, left, right in found]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            **_model(tokens, merges),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
        },
    }


def _model(tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **how: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **how,
        "vocab": {token: at for at, token in enumerate(tokens)},
        "merges": [list(each) for each in merges],
    }
