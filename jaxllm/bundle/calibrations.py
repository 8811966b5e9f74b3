"""Parts of a bundle from calibrations: integer prefill, contexts, statistics of experts."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle, Fields, PartFormat
from jaxllm.contexts.codecs import WIDTHS, find_codec
from jaxllm.contexts.tolerance import PARTS, Candidate, ContextCalibration
from jaxllm.errors import ConfigError
from jaxllm.experts.prediction import PathCounts, TokenExperts
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.int8_prefill.shadow import PRODUCTS, product_sizes
from jaxllm.models.parameters import ENCODER

_MAX_CHUNK_TOKENS = 256
_LEAST_SCALE = 1e-30


# Contexts: the choice of their codec, and measured errors.


def contexts_parts(
    calibration: ContextCalibration, facts: Mapping[str, Any] | None = None
) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for display."""
    candidates = list(calibration.errors)
    arrays = {
        "errors": np.stack([calibration.errors[each] for each in candidates]).astype(np.float32),
        "sensitivity": calibration.sensitivity.astype(np.float32),
    }
    own = {
        "candidates": [[each.codec, each.chunk_tokens] for each in candidates],
        "chosen": [calibration.chosen.codec, calibration.chosen.chunk_tokens],
    }
    return {_CONTEXTS.name: Part({**(facts or {}), **own}, arrays)}


def _read_contexts(bundle: Bundle, fields: Fields) -> ContextCalibration:
    layers, candidates = bundle.cfg.layers, [_candidate(each) for each in fields.facts["candidates"]]
    chosen = _candidate(fields.facts["chosen"])
    if len(set(candidates)) != len(candidates) or chosen not in candidates:
        raise ConfigError("its choice is not one of different candidates")
    errors = fields.array(
        "errors", "float32", (len(candidates), layers, len(WIDTHS), len(PARTS)), low=0
    ).copy()  # The bundle may be closed.
    sensitivity = fields.array("sensitivity", "float32", (layers, len(PARTS)), low=0).copy()
    return ContextCalibration(
        chosen=chosen, errors=dict(zip(candidates, errors, strict=True)), sensitivity=sensitivity
    )


def _candidate(facts: Any) -> Candidate:
    codec, tokens = facts
    if type(codec) is not str or type(tokens) is not int or not 1 <= tokens <= _MAX_CHUNK_TOKENS:
        raise ConfigError(f"{facts!s:.80} is no codec with a length of chunks")
    find_codec(codec)
    return Candidate(codec, tokens)


_CONTEXTS = PartFormat(
    "contexts", "calibration of contexts", "make it again with `jaxllm calibrate contexts`", _read_contexts
)
read_contexts = _CONTEXTS.read


# Integer prefill: activation scales, and float rows of channels with outliers.


def prefill_parts(calibration: PrefillCalibration, facts: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for display."""
    arrays: dict[str, np.ndarray] = {"steps": calibration.steps}
    for (layer, product), channels in calibration.channels.items():
        arrays[f"channels.{layer}.{product}"] = channels
        for number, rows in enumerate(calibration.rows[layer, product]):
            arrays[f"rows.{layer}.{product}.{number}"] = rows
    own = {
        "levels": list(calibration.levels),
        "shadowed": list(calibration.shadowed),
        "losses": {str(level): list(each) for level, each in calibration.losses.items()},
    }
    return {_PREFILL.name: Part({**(facts or {}), **own}, arrays)}


def has_channel_scales(bundle: Bundle) -> bool:
    """Whether all matrices of layers are of 8 bits with one scale per channel, which integer prefill
    multiplies; those of GGUF files and quantized folders have groups."""
    matrices = [
        each for name, each in bundle.layout.tensors.items() if name.startswith("layers.") and each.bits
    ]
    return bool(matrices) and not any(each.group for each in matrices)


def _read_prefill(bundle: Bundle, fields: Fields) -> PrefillCalibration:
    cfg, facts = bundle.cfg, fields.facts
    levels, shadowed = tuple(facts["levels"]), tuple(facts["shadowed"])
    if not levels or any(type(each) is not int for each in levels) or list(levels) != sorted(set(levels)):
        raise ConfigError(f"its levels are {levels!s:.80}")
    if len(shadowed) != cfg.layers or any(type(each) is not bool for each in shadowed):
        raise ConfigError(f"it does not say of {cfg.layers} layers whether they have a shadow")
    losses: dict[int, Any] = {int(level): tuple(map(float, each)) for level, each in facts["losses"].items()}
    if any(len(each) != 2 or any(math.isnan(loss) for loss in each) for each in losses.values()):
        raise ConfigError("its losses are no pairs of numbers")
    steps = fields.array("steps", "float32", (len(levels), cfg.layers, len(PRODUCTS)), low=_LEAST_SCALE)
    channels, rows = {}, {}
    for layer in (layer for layer, with_shadow in enumerate(shadowed) if with_shadow):
        for product in range(len(PRODUCTS)):
            inputs, outputs = product_sizes(cfg, layer, product)
            name = f"channels.{layer}.{product}"
            stored = fields.take(name)
            if stored is None or stored.ndim != 1 or stored.dtype != np.int32 or len(stored) > inputs:
                raise ConfigError(f"the channels of layer {layer} are not a list of at most {inputs}")
            real = stored[stored >= 0]
            if (stored < -1).any() or (real >= inputs).any() or len(np.unique(real)) != len(real):
                raise ConfigError(f"the channels of layer {layer} are not different ones of {inputs}")
            channels[layer, product] = stored
            rows[layer, product] = tuple(
                fields.array(f"rows.{layer}.{product}.{number}", "float16", (len(stored), each))
                for number, each in enumerate(outputs)
            )
    if len({len(each) for each in channels.values()}) > 1:
        raise ConfigError("its products have different numbers of rows")
    return PrefillCalibration(
        levels=levels, steps=steps, shadowed=shadowed, channels=channels, rows=rows, losses=losses
    )


_PREFILL = PartFormat(
    "prefill",
    "calibration of integer prefill",
    "make it again with `jaxllm calibrate prefill`",
    _read_prefill,
)
read_prefill, prefill_facts, release_prefill = _PREFILL.read, _PREFILL.facts, _PREFILL.release


# Experts: how their bit widths were chosen, activation paths, and tokens' experts. Those of an encoder have
# names with the prefix `ENCODER`.

Statistics = tuple[PathCounts, TokenExperts]


def expert_parts(
    counts: PathCounts,
    facts: Mapping[str, Any] | None = None,
    tokens: TokenExperts | None = None,
    *,
    encoder: Statistics | None = None,
) -> dict[str, Part]:
    """The part of a bundle with the statistics of a text, for `write_bundle`; `facts` are for display.
    `encoder` has the statistics of an encoder and its sources, besides the decoder's."""
    arrays = {**counts.to_arrays(), **({} if tokens is None else tokens.to_arrays())}
    for side in encoder or ():
        arrays |= {ENCODER + name: array for name, array in side.to_arrays().items()}
    return {_EXPERTS.name: Part(dict(facts or {}), arrays)}


def copied_parts(bundle: Bundle) -> dict[str, Part]:
    """The part of a bundle with statistics of its experts, if there is one, for another bundle of the same
    model.

    Raises:
      BundleError: its checksum is wrong.
    """
    part = bundle.load_part(_EXPERTS.name)
    return {} if part is None else {_EXPERTS.name: part}


def read_path_counts(bundle: Bundle) -> PathCounts:
    """The statistics of activation paths of the decoder; empty if there are none.

    Raises:
      BundleError: the statistics are corrupt, or belong to another model.
    """
    found, cfg = _EXPERTS.read(bundle), bundle.cfg
    return PathCounts.none(layers=sum(cfg.sparse_layers), experts=cfg.experts) if found is None else found[0]


def read_token_experts(bundle: Bundle) -> TokenExperts:
    """The statistics of tokens' experts of the decoder; empty if there are none.

    Raises:
      BundleError: see `read_path_counts`.
    """
    found, cfg = _EXPERTS.read(bundle), bundle.cfg
    return TokenExperts.none(sum(cfg.sparse_layers), cfg.experts_per_token) if found is None else found[1]


def _read_experts(bundle: Bundle, fields: Fields) -> Statistics:
    """The statistics of the decoder; those of an encoder are only copied."""
    cfg, arrays = bundle.cfg, fields.rest()
    arrays = {name: each for name, each in arrays.items() if not name.startswith(ENCODER)}
    shape = {"layers": sum(cfg.sparse_layers), "experts": cfg.experts}
    tokens = TokenExperts.from_arrays(arrays, **shape, choices=cfg.experts_per_token)
    return PathCounts.from_arrays(arrays, **shape), tokens


_EXPERTS = PartFormat(
    "experts", "statistics of experts", "make it again with `jaxllm calibrate experts`", _read_experts
)
expert_facts = _EXPERTS.facts
