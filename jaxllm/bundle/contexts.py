"""Reads and writes the calibration of contexts in a bundle: the choice of their codec, measured errors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.calibrated import read_calibration
from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import ConfigError
from jaxllm.kv.calibration import PARTS, Candidate, ContextCalibration
from jaxllm.kv.codecs import WIDTHS, find_codec

_PART = "contexts"
_MOST_CHUNK_TOKENS, _MOST = 256, 1e30


def contexts_parts(
    calibration: ContextCalibration, facts: Mapping[str, Any] | None = None
) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for people."""
    candidates = list(calibration.errors)
    arrays = {
        "errors": np.stack([calibration.errors[each] for each in candidates]).astype(np.float32),
        "sensitivity": calibration.sensitivity.astype(np.float32),
    }
    told = {
        **(facts or {}),
        "candidates": [[each.codec, each.chunk_tokens] for each in candidates],
        "chosen": [calibration.chosen.codec, calibration.chosen.chunk_tokens],
    }
    return {_PART: Part(told, arrays)}


def read_contexts(bundle: Bundle) -> ContextCalibration | None:
    """The calibration of a bundle; None if it has none.

    Raises:
      BundleError: the calibration is corrupt, malformed, or belongs to another model.
    """
    return read_calibration(bundle, _PART, "contexts", _checked)


def _checked(bundle: Bundle, part: Part) -> ContextCalibration:
    layers, candidates = bundle.cfg.layers, [_candidate(each) for each in part.facts["candidates"]]
    chosen = _candidate(part.facts["chosen"])
    if len(set(candidates)) != len(candidates) or chosen not in candidates:
        raise ConfigError("its choice is not one of different candidates")
    if part.arrays.keys() != {"errors", "sensitivity"}:
        raise ConfigError(f"it holds {', '.join(sorted(part.arrays))[:80]}")
    errors = _numbers(part, "errors", (len(candidates), layers, len(WIDTHS), len(PARTS)))
    return ContextCalibration(
        chosen=chosen,
        errors=dict(zip(candidates, errors, strict=True)),
        sensitivity=_numbers(part, "sensitivity", (layers, len(PARTS))),
    )


def _candidate(facts: Any) -> Candidate:
    codec, tokens = facts
    if type(codec) is not str or type(tokens) is not int or not 1 <= tokens <= _MOST_CHUNK_TOKENS:
        raise ConfigError(f"{facts!s:.80} is no codec with a length of chunks")
    find_codec(codec)
    return Candidate(codec, tokens)


def _numbers(part: Part, name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = part.arrays[name]
    if found.shape != shape or found.dtype != np.float32:
        raise ConfigError(f"{name} must be float32 {list(shape)}, got {found.dtype.name} {list(found.shape)}")
    # The comparison is false for NaN.
    if not ((found >= 0) & (found <= _MOST)).all():
        raise ConfigError(f"{name} are not all in [0, {_MOST:g}]")
    # A copy, for the bundle may be closed.
    return np.array(found)
