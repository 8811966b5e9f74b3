"""Makes a tokenizer of byte pairs with as many entries as published models have.

Merges are learned of texts as those of published tokenizers are. Texts of some ten megabytes have about
128,000 words; where they have fewer, tokens that are joined at random fill the vocabulary: they never occur,
but are read, checked and stored as the others are.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.text.tokenizer import TokenizerFiles

# Llama 3's rule by which texts are split first, and llama.cpp's name of it.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAME = "llama-bpe"
_TEXTS = (".txt", ".json", ".jsonl", ".csv", ".de", ".en")
_LONGEST = 16


def byte_pairs(size: int, texts: Iterable[Path]) -> tuple[TokenizerFiles, int]:
    """A tokenizer of `size` entries, and how many of them were learned of the texts.

    Args:
      size: at least the 256 bytes.
      texts: UTF-8 files.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE(ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train([str(each) for each in texts], trainer)
    data = json.loads(library.to_str())
    learned = len(data["model"]["vocab"])
    _fill(data["model"], size)
    return TokenizerFiles(tokenizer_json=json.dumps(data, ensure_ascii=False)), learned


def texts_of(data: Path) -> Iterator[Path]:
    """The texts in a folder of data sets, in order."""
    return (each for each in sorted(data.rglob("*")) if each.suffix in _TEXTS and each.is_file())


def vocabulary_keys(files: TokenizerFiles) -> dict[str, Any]:
    """The metadata of such a tokenizer in a GGUF file, without the prefix `tokenizer.ggml.`."""
    model = json.loads(files.tokenizer_json)["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": _SPLIT_NAME,
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": [" ".join(each) for each in model["merges"]],
        "add_bos_token": False,
    }


def _fill(model: dict[str, Any], size: int) -> None:
    """Joins tokens at random until there are `size` of them."""
    draw, tokens = np.random.default_rng(0), list(model["vocab"])
    while len(tokens) < size:
        left, right = (tokens[int(at)] for at in draw.integers(0, len(tokens), 2))
        token = left + right
        if len(token) <= _LONGEST and token not in model["vocab"]:
            model["vocab"][token] = len(tokens)
            tokens.append(token)
            model["merges"].append([left, right])
