"""Reads and writes a bundle's facts about its experts: how bitwidths were chosen, activation paths, tokens'
experts."""

from collections.abc import Mapping
from typing import Any

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import BundleError, ConfigError
from jaxllm.experts.activation_paths import PathCounts
from jaxllm.experts.token_experts import TokenExperts

_PART = "experts"


def expert_parts(
    counts: PathCounts, facts: Mapping[str, Any] | None = None, tokens: TokenExperts | None = None
) -> dict[str, Part]:
    """The part of a bundle with the statistics of a text, for `write_bundle`; `facts` are for people."""
    of_tokens = {} if tokens is None else tokens.to_arrays()
    return {_PART: Part({**(facts or {})}, {**counts.to_arrays(), **of_tokens})}


def expert_facts(bundle: Bundle) -> dict[str, Any]:
    """Facts about how the experts' bitwidths were chosen; empty if there are none."""
    part = bundle.layout.parts.get(_PART)
    return {} if part is None else dict(part.facts)


def read_path_counts(bundle: Bundle) -> PathCounts:
    """The statistics of activation paths; empty ones for a bundle without them.

    Raises:
      BundleError: the statistics are corrupt, or belong to another model.
    """
    cfg, layers = bundle.cfg, _sparse_layers(bundle)
    part = bundle.load_part(_PART)
    if part is None:
        return PathCounts.none(layers=layers, experts=cfg.experts)
    try:
        return PathCounts.from_arrays(part.arrays, layers=layers, experts=cfg.experts)
    except ConfigError as error:
        raise _unusable(bundle, error) from error


def read_token_experts(bundle: Bundle) -> TokenExperts:
    """The statistics of tokens' experts; empty ones for a bundle without them.

    Raises:
      BundleError: the statistics are corrupt, or belong to another model.
    """
    cfg, part = bundle.cfg, bundle.load_part(_PART)
    shape = {"layers": _sparse_layers(bundle), "choices": cfg.experts_per_token}
    if part is None:
        return TokenExperts.none(**shape)
    try:
        return TokenExperts.from_arrays(part.arrays, experts=cfg.experts, **shape)
    except ConfigError as error:
        raise _unusable(bundle, error) from error


def _sparse_layers(bundle: Bundle) -> int:
    return sum(map(bundle.cfg.is_sparse, range(bundle.cfg.layers)))


def _unusable(bundle: Bundle, error: ConfigError) -> BundleError:
    return BundleError(f"{bundle.path}: {error}; make it again with `jaxllm quantize-experts`")
