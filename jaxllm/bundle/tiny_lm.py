"""The tiny LM of an elastic bundle: weights, tokenizer, and the meaning of its classes and marks."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.levels import read_ladder
from jaxllm.bundle.reader import Bundle
from jaxllm.config import WHOLE
from jaxllm.elastic.compression import MARKS
from jaxllm.elastic.slo import marks
from jaxllm.errors import BundleError, CheckpointError, ConfigError
from jaxllm.models.tiny_lm import TlmConfig, tlm_shapes
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

_PART = "tiny-lm"
# The tokenizer is an array of JSON bytes next to the weights: in the manifest it would be parsed at every
# opening.
_TOKENIZER = "tokenizer"
# `row_tokens` of bundles that do not store it: all recipes of their version used this.
_UNTOLD_ROW_TOKENS = 256
_FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyLm:
    """A tiny LM with all data for its use.

    Attributes:
      cfg: its shape.
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
        _check_classes("levels", self.levels, self.cfg.levels, (int,), WHOLE)
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
        _check_params(self.cfg, self.params)


def tiny_lm_parts(tiny: TinyLm, facts: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """The part of a bundle with a tiny LM, for `write_bundle`.

    Args:
      tiny: the tiny LM.
      facts: further facts, for display.
    """
    told = {
        **(facts or {}),
        "config": tiny.cfg.to_json(),
        "levels": list(tiny.levels),
        "prompt_ratios": list(tiny.prompt_ratios),
        "mark_ids": list(tiny.mark_ids),
        "row_tokens": tiny.row_tokens,
        "own_tokenizer": tiny.tokenizer is not None,
    }
    arrays = {name: np.asarray(tiny.params[name]) for name in tlm_shapes(tiny.cfg)}
    if tiny.tokenizer is not None:
        raw = json.dumps(tiny.tokenizer.to_json()).encode()
        arrays[_TOKENIZER] = np.frombuffer(raw, np.uint8)
    return {_PART: Part(told, arrays)}


def read_tiny_lm(bundle: Bundle) -> TinyLm | None:
    """The tiny LM of a bundle, its arrays views of the file; None if it has none.

    Raises:
      BundleError: the tiny LM is corrupt, malformed, or does not fit the bundle's model and levels.
    """
    part = bundle.load_part(_PART)
    if part is None:
        return None
    try:
        facts, arrays = part.facts, dict(part.arrays)
        raw = arrays.pop(_TOKENIZER, None)
        if facts["own_tokenizer"] is not (raw is not None):
            raise ConfigError("its facts and its arrays disagree on whether it has a tokenizer")
        cfg = TlmConfig.from_json(facts["config"])
        tiny = TinyLm(
            cfg=cfg,
            params=arrays,
            levels=tuple(facts["levels"]),
            prompt_ratios=tuple(facts["prompt_ratios"]),
            mark_ids=tuple(facts["mark_ids"]),
            row_tokens=facts.get("row_tokens", min(_UNTOLD_ROW_TOKENS, cfg.encoder.window_tokens)),
            tokenizer=None if raw is None else _tokenizer(raw),
        )
        _check_fit(bundle, tiny)
    except (KeyError, TypeError, ConfigError) as error:
        raise BundleError(
            f"{bundle.path}: its tiny LM is malformed ({error!s:.300}); prepare it again"
        ) from error
    return tiny


def _check_classes(what: str, values: Any, count: int, kinds: tuple[type, ...], most: int) -> None:
    numbers = all(type(each) in kinds and 0 < each <= most for each in values)
    if not numbers or list(values) != sorted(set(values)) or len(values) != count:
        raise ConfigError(f"its {count} {what} must be ascending numbers in (0, {most}], got {values!s:.200}")


def _check_params(cfg: TlmConfig, params: Mapping[str, np.ndarray]) -> None:
    shapes = tlm_shapes(cfg)
    if wrong := params.keys() ^ shapes.keys():
        raise ConfigError(f"the parameters and the config disagree on {min(wrong)}")
    for name, shape in shapes.items():
        value = params[name]
        if tuple(value.shape) != shape or value.dtype.name not in _FLOATS:
            raise ConfigError(
                f"parameter {name} must be floats of shape {list(shape)}, got {value.dtype.name} "
                f"{list(value.shape)}"
            )


def _tokenizer(raw: np.ndarray) -> TokenizerFiles:
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raise ConfigError("its tokenizer must be bytes")
    try:
        return TokenizerFiles.from_json(json.loads(raw.tobytes()))
    except (CheckpointError, ValueError, RecursionError) as error:
        raise ConfigError(f"its tokenizer is malformed: {error}") from error


def _check_fit(bundle: Bundle, tiny: TinyLm) -> None:
    """Raises ConfigError unless every class is a level of the bundle, and every token has an embedding."""
    ladder = read_ladder(bundle)
    offered = (WHOLE,) if ladder is None else ladder.levels
    if missing := sorted(set(tiny.levels) - set(offered)):
        raise ConfigError(f"it chooses between levels of which the bundle lacks {missing}")
    try:
        files = bundle.tokenizer_files() if tiny.tokenizer is None else tiny.tokenizer
        tokens = Tokenizer(files).vocab_size
    except CheckpointError as error:
        raise ConfigError(f"its tokenizer is malformed: {error}") from error
    if tokens > tiny.cfg.encoder.vocab_size:
        raise ConfigError(
            f"its tokenizer has {tokens} tokens, it has {tiny.cfg.encoder.vocab_size}; it is of another model"
        )
