"""Parts of a bundle from calibrations: integer prefill, contexts, statistics of experts."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import WIDTHS, find_codec
from jaxllm.contexts.tolerance import PARTS, Candidate, ContextCalibration
from jaxllm.errors import BundleError, ConfigError
from jaxllm.experts.prediction import PathCounts, TokenExperts
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.int8_prefill.shadow import PRODUCTS, product_sizes
from jaxllm.models.parameters import ENCODER

# Reads the calibrations that later commands add to a bundle.


_Calibration = TypeVar("_Calibration")


def read_calibration(
    bundle: Bundle, part: str, subject: str, checked: Callable[[Bundle, Part], _Calibration]
) -> _Calibration | None:
    """The calibration in a part of a bundle; None if there is no such part.

    Args:
      bundle: bundle of the part.
      part: name of the part; `jaxllm calibrate PART` makes it.
      subject: name of the calibrated part, for messages.
      checked: reads and validates the part; its errors mean that the part is malformed.

    Raises:
      BundleError: the part is corrupt, malformed, or belongs to another model.
    """
    found = bundle.load_part(part)
    if found is None:
        return None
    try:
        return checked(bundle, found)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise BundleError(
            f"{bundle.path}: its calibration of {subject} is malformed ({error!s:.300}); make it again with "
            f"`jaxllm calibrate {part}`"
        ) from error


# Reads and writes the calibration of contexts in a bundle: the choice of their codec, measured errors.


_PART = "contexts"
_MOST_CHUNK_TOKENS, _MOST = 256, 1e30


def contexts_parts(
    calibration: ContextCalibration, facts: Mapping[str, Any] | None = None
) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for display."""
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


# Reads and writes the calibration of integer prefill in a bundle: steps, and float rows of channels with
# outliers.


_PART_PREFILL = "prefill"
_LEAST_STEP, _LARGEST_STEP = 1e-30, 1e30


def prefill_parts(calibration: PrefillCalibration, facts: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for display."""
    arrays: dict[str, np.ndarray] = {"steps": calibration.steps}
    for (layer, product), channels in calibration.channels.items():
        arrays[f"channels.{layer}.{product}"] = channels
        for number, rows in enumerate(calibration.rows[layer, product]):
            arrays[_rows(layer, product, number)] = rows
    told = {
        **(facts or {}),
        "levels": list(calibration.levels),
        "shadowed": list(calibration.shadowed),
        "losses": {str(level): list(each) for level, each in calibration.losses.items()},
    }
    return {_PART_PREFILL: Part(told, arrays)}


def has_channel_scales(bundle: Bundle) -> bool:
    """Whether all matrices of layers are of 8 bits with one scale per channel, which integer prefill
    multiplies; those of GGUF files and quantized folders have groups."""
    matrices = [
        each for name, each in bundle.layout.tensors.items() if name.startswith("layers.") and each.bits
    ]
    return bool(matrices) and not any(each.group for each in matrices)


def prefill_facts(bundle: Bundle) -> dict[str, Any]:
    """Facts about a bundle's integer prefill; empty if it has none."""
    part = bundle.layout.parts.get(_PART_PREFILL)
    return {} if part is None else dict(part.facts)


def release_prefill(bundle: Bundle) -> None:
    """Releases the memory of a checked calibration (see `Bundle.release_part`)."""
    bundle.release_part(_PART_PREFILL)


def read_prefill(bundle: Bundle) -> PrefillCalibration | None:
    """The calibration of a bundle, its arrays views of the file; None if it has none.

    Raises:
      BundleError: the calibration is corrupt, malformed, or belongs to another model.
    """
    return read_calibration(bundle, _PART_PREFILL, "integer prefill", _checked_prefill)


def _checked_prefill(bundle: Bundle, part: Part) -> PrefillCalibration:
    cfg, facts, arrays = bundle.cfg, part.facts, dict(part.arrays)
    levels, shadowed = tuple(facts["levels"]), tuple(facts["shadowed"])
    if not levels or any(type(each) is not int for each in levels) or list(levels) != sorted(set(levels)):
        raise ConfigError(f"its levels are {levels!s:.80}")
    if len(shadowed) != cfg.layers or any(type(each) is not bool for each in shadowed):
        raise ConfigError(f"it does not say of {cfg.layers} layers whether they have a shadow")
    losses = {int(level): tuple(map(float, each)) for level, each in facts["losses"].items()}
    if any(len(each) != 2 or any(math.isnan(loss) for loss in each) for each in losses.values()):
        raise ConfigError("its losses are no pairs of numbers")
    steps = _array(arrays, "steps", (len(levels), cfg.layers, len(PRODUCTS)), np.float32)
    # The comparison is false for NaN.
    if not ((steps >= _LEAST_STEP) & (steps <= _LARGEST_STEP)).all():
        raise ConfigError(f"its steps are not all in [{_LEAST_STEP:g}, {_LARGEST_STEP:g}]")
    # Older versions stored here the number of rows in memory.
    arrays.pop("hot", None)
    channels, rows = {}, {}
    for layer in (layer for layer, with_shadow in enumerate(shadowed) if with_shadow):
        for product in range(len(PRODUCTS)):
            inputs, outputs = product_sizes(cfg, layer, product)
            own = arrays.pop(f"channels.{layer}.{product}")
            if own.ndim != 1 or own.dtype != np.int32 or len(own) > inputs:
                raise ConfigError(f"the channels of layer {layer} are {own.dtype.name} {list(own.shape)}")
            real = own[own >= 0]
            if (own < -1).any() or (real >= inputs).any() or len(np.unique(real)) != len(real):
                raise ConfigError(f"the channels of layer {layer} are not different ones of {inputs}")
            channels[layer, product] = own
            rows[layer, product] = tuple(
                _finite(arrays, _rows(layer, product, number), (len(own), each))
                for number, each in enumerate(outputs)
            )
    if len({len(own) for own in channels.values()}) > 1:
        raise ConfigError("its products have different numbers of rows")
    if arrays:
        raise ConfigError(f"it holds {min(arrays)}, which nothing takes")
    return PrefillCalibration(
        levels=levels,
        steps=steps,
        shadowed=shadowed,
        channels=channels,
        rows=rows,
        losses=losses,  # pyright: ignore[reportArgumentType]: pairs
    )


def _rows(layer: int, product: int, number: int) -> str:
    return f"rows.{layer}.{product}.{number}"


def _array(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    found = arrays.pop(name)
    if found.shape != shape or found.dtype != dtype:
        raise ConfigError(f"{name} must be {np.dtype(dtype).name} {list(shape)}, got {found.dtype.name} "
                          f"{list(found.shape)}")  # fmt: skip
    return found


def _finite(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = _array(arrays, name, shape, np.float16)
    if not np.isfinite(found).all():
        raise ConfigError(f"{name} holds NaN or infinity")
    return found


# Reads and writes a bundle's facts about its experts: how bitwidths were chosen, activation paths, tokens'
# experts.


_PART_EXPERTS = "experts"


def expert_parts(
    counts: PathCounts,
    facts: Mapping[str, Any] | None = None,
    tokens: TokenExperts | None = None,
    *,
    encoder: tuple[PathCounts, TokenExperts] | None = None,
) -> dict[str, Part]:
    """The part of a bundle with the statistics of a text, for `write_bundle`; `facts` are for display.
    `encoder` has the statistics of an encoder and its sources, besides the decoder's."""
    of_tokens = {} if tokens is None else tokens.to_arrays()
    sides = () if encoder is None else encoder
    own = {ENCODER + name: array for side in sides for name, array in side.to_arrays().items()}
    return {_PART_EXPERTS: Part({**(facts or {})}, {**counts.to_arrays(), **of_tokens, **own})}


def copied_parts(bundle: Bundle) -> dict[str, Part]:
    """The part of a bundle with statistics of its experts, for another bundle of the same model.

    Raises:
      BundleError: see `read_path_counts`.
    """
    encoder = None
    if bundle.cfg.encoder is not None:
        encoder = read_path_counts(bundle, encoder=True), read_token_experts(bundle, encoder=True)
    counts, tokens = read_path_counts(bundle), read_token_experts(bundle)
    return expert_parts(counts, expert_facts(bundle), tokens, encoder=encoder)


def expert_facts(bundle: Bundle) -> dict[str, Any]:
    """Facts about the choice of the experts' bit widths; empty if there are none."""
    part = bundle.layout.parts.get(_PART_EXPERTS)
    return {} if part is None else dict(part.facts)


def read_path_counts(bundle: Bundle, *, encoder: bool = False) -> PathCounts:
    """The statistics of activation paths of the decoder, or of the `encoder`; empty ones for a bundle without
    them.

    Raises:
      BundleError: the statistics are corrupt, or belong to another model.
    """
    cfg, arrays = _side(bundle.cfg, encoder), _arrays(bundle, encoder)
    shape = {"layers": sum(cfg.sparse_layers), "experts": cfg.experts}
    if arrays is None:
        return PathCounts.none(**shape)
    try:
        return PathCounts.from_arrays(arrays, **shape)
    except ConfigError as error:
        raise _unusable(bundle, error) from error


def read_token_experts(bundle: Bundle, *, encoder: bool = False) -> TokenExperts:
    """The statistics of tokens' experts of the decoder, or of the `encoder`; empty ones for a bundle without
    them.

    Raises:
      BundleError: the statistics are corrupt, or belong to another model.
    """
    cfg, arrays = _side(bundle.cfg, encoder), _arrays(bundle, encoder)
    shape = {"layers": sum(cfg.sparse_layers), "choices": cfg.experts_per_token}
    if arrays is None:
        return TokenExperts.none(**shape)
    try:
        return TokenExperts.from_arrays(arrays, experts=cfg.experts, **shape)
    except ConfigError as error:
        raise _unusable(bundle, error) from error


def _side(cfg: ModelConfig, encoder: bool) -> ModelConfig:
    """The encoder, or the decoder without it."""
    side = cfg.encoder if encoder else cfg
    if side is None:
        raise ConfigError(f"{cfg.model_type} has no encoder, and no statistics of one")
    return side


def _arrays(bundle: Bundle, encoder: bool) -> dict[str, np.ndarray] | None:
    """The statistics of a side by name; None for a bundle without them."""
    part = bundle.load_part(_PART_EXPERTS)
    own = {
        name.removeprefix(ENCODER): array
        for name, array in ({} if part is None else part.arrays).items()
        if name.startswith(ENCODER) == encoder
    }
    return None if part is None or (encoder and not own) else own


def _unusable(bundle: Bundle, error: ConfigError) -> BundleError:
    return BundleError(f"{bundle.path}: {error}; make it again with `jaxllm calibrate experts`")
