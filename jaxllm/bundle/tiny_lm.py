"""The tiny LM of an elastic bundle: weights, tokenizer, and the meaning of its classes and marks."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.levels import read_ladder
from jaxllm.bundle.reader import Bundle, Fields, PartFormat, require_parameters
from jaxllm.config import FULL_LEVEL
from jaxllm.elastic.compression import MARKS
from jaxllm.elastic.slo import marks
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.tiny_lm import TlmConfig, tlm_shapes
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

# The tokenizer is an array of JSON bytes next to the weights: in the manifest it would be parsed at every
# opening.
_TOKENIZER = "tokenizer"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyLm:
    """A tiny LM with all data for its use.

    Attributes:
      params: float arrays, those of `tlm_shapes(cfg)`.
      levels: per class of the model, its level in percent, ascending.
      prompt_ratios: per class of the prompt, its share in (0, 1], ascending.
      mark_ids: token ids of `marks()`.
      row_tokens: tokens of a row in training and in use.
      tokenizer: its own; None if it uses the model's tokens.

    Raises:
      ConfigError: the fields do not fit each other.
    """

    cfg: TlmConfig
    params: Mapping[str, np.ndarray]
    levels: tuple[int, ...]
    prompt_ratios: tuple[float, ...]
    mark_ids: tuple[int, ...]
    row_tokens: int
    tokenizer: TokenizerFiles | None = None

    def __post_init__(self) -> None:
        _check_classes("levels", self.levels, self.cfg.levels, (int,), FULL_LEVEL)
        _check_classes("prompt ratios", self.prompt_ratios, self.cfg.prompt_levels, (int, float), 1)
        vocab, ids = self.cfg.encoder.vocab_size, self.mark_ids
        known = all(type(each) is int and 0 <= each < vocab for each in ids)
        if not known or not len(ids) == len(set(ids)) == len(marks()):
            raise ConfigError(
                f"a tiny LM needs {len(marks())} different tokens in [0, {vocab}) for its marks, got {ids}"
            )
        window = self.cfg.encoder.window_tokens
        if type(self.row_tokens) is not int or not MARKS < self.row_tokens <= window:
            raise ConfigError(
                f"a tiny LM's rows must have {MARKS + 1} to {window} tokens, its encoder's window, got "
                f"{self.row_tokens!r:.80}"
            )
        require_parameters(tlm_shapes(self.cfg), self.params)


def tiny_lm_parts(tiny: TinyLm) -> dict[str, Part]:
    """The part of a bundle with a tiny LM, for `write_bundle`."""
    facts = {
        "config": tiny.cfg.to_json(),
        "levels": list(tiny.levels),
        "prompt_ratios": list(tiny.prompt_ratios),
        "mark_ids": list(tiny.mark_ids),
        "row_tokens": tiny.row_tokens,
        "own_tokenizer": tiny.tokenizer is not None,
    }
    arrays = {name: np.asarray(tiny.params[name]) for name in tlm_shapes(tiny.cfg)}
    if tiny.tokenizer is not None:
        arrays[_TOKENIZER] = np.frombuffer(json.dumps(tiny.tokenizer.to_json()).encode(), np.uint8)
    return {_TINY_LM.name: Part(facts, arrays)}


def _check_classes(what: str, values: Any, count: int, kinds: tuple[type, ...], most: int) -> None:
    numbers = all(type(each) in kinds and 0 < each <= most for each in values)
    if not numbers or list(values) != sorted(set(values)) or len(values) != count:
        raise ConfigError(f"its {count} {what} must be ascending numbers in (0, {most}], got {values!s:.200}")


def _read(bundle: Bundle, fields: Fields) -> TinyLm:
    facts, raw = fields.facts, fields.take(_TOKENIZER)
    if facts["own_tokenizer"] is not (raw is not None):
        raise ConfigError("its facts and its arrays disagree on whether it has a tokenizer")
    tiny = TinyLm(
        cfg=TlmConfig.from_json(facts["config"]),
        params=fields.rest(),
        **{name: tuple(facts[name]) for name in ("levels", "prompt_ratios", "mark_ids")},
        row_tokens=facts["row_tokens"],
        tokenizer=None if raw is None else _tokenizer(raw),
    )
    # Every class must be a level of the bundle, and every token must have an embedding.
    ladder = read_ladder(bundle)
    offered = (FULL_LEVEL,) if ladder is None else ladder.levels
    if missing := sorted(set(tiny.levels) - set(offered)):
        raise ConfigError(f"it chooses between levels of which the bundle lacks {missing}")
    tokens = Tokenizer(bundle.tokenizer_files() if tiny.tokenizer is None else tiny.tokenizer).vocab_size
    if tokens > tiny.cfg.encoder.vocab_size:
        raise ConfigError(
            f"its tokenizer has {tokens} tokens, it has {tiny.cfg.encoder.vocab_size}; it is of another model"
        )
    return tiny


def _tokenizer(raw: np.ndarray) -> TokenizerFiles:
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise ConfigError("its tokenizer must be bytes")
    try:
        return TokenizerFiles.from_json(json.loads(raw.tobytes()))
    except (CheckpointError, ValueError, RecursionError) as error:
        raise ConfigError(f"its tokenizer is malformed: {error}") from error


_TINY_LM = PartFormat("tiny-lm", "tiny LM", "prepare it again", _read)
read_tiny_lm = _TINY_LM.read
