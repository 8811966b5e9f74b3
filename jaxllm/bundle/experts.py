"""Reads and writes a bundle's facts about its experts: how bitwidths were chosen, activation paths, tokens'
experts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import BundleError, ConfigError
from jaxllm.experts.activation_paths import PathCounts
from jaxllm.experts.token_experts import TokenExperts
from jaxllm.models.parameters import ENCODER

_PART = "experts"


def expert_parts(
    counts: PathCounts,
    facts: Mapping[str, Any] | None = None,
    tokens: TokenExperts | None = None,
    *,
    encoder: tuple[PathCounts, TokenExperts] | None = None,
) -> dict[str, Part]:
    """The part of a bundle with the statistics of a text, for `write_bundle`; `facts` are for people.
    `encoder` are those of an encoder and its sources, beside the decoder's."""
    of_tokens = {} if tokens is None else tokens.to_arrays()
    sides = () if encoder is None else encoder
    own = {ENCODER + name: array for side in sides for name, array in side.to_arrays().items()}
    return {_PART: Part({**(facts or {})}, {**counts.to_arrays(), **of_tokens, **own})}


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
    """Facts about how the experts' bitwidths were chosen; empty if there are none."""
    part = bundle.layout.parts.get(_PART)
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
    part = bundle.load_part(_PART)
    own = {
        name.removeprefix(ENCODER): array
        for name, array in ({} if part is None else part.arrays).items()
        if name.startswith(ENCODER) == encoder
    }
    return None if part is None or (encoder and not own) else own


def _unusable(bundle: Bundle, error: ConfigError) -> BundleError:
    return BundleError(f"{bundle.path}: {error}; make it again with `jaxllm quantize-experts`")
