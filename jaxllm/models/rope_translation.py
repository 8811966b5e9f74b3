"""Translates rotary embeddings between Hugging Face configs and `RopeConfig`.

Two spellings exist: top-level `rope_theta` with an optional `rope_scaling` object, and since transformers 5
one `rope_parameters` object with both. Both are read, with the precedence that transformers gives them; the
older one is written because every version of transformers reads it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.config import RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.layer_windows import FULL, SLIDING

_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    reader: ConfigReader,
    *,
    head_dim: int,
    window_tokens: int,
    theta: float = 10000.0,
    partial: float = 1.0,
    growth: bool = False,
) -> RopeConfig:
    """The one rotary embedding of a model.

    Args:
      reader: at the top level of the config.
      head_dim: H.
      window_tokens: `max_position_embeddings`, the default of a scaling's original window.
      theta: base if the config has none.
      partial: share of the head's dimensions that are rotated, if the config has none.
      growth: whether queries may grow with the position (`llama_4_scaling_beta`).

    Raises:
      ConfigError: a scaling kind that is not supported, or one whose numbers are missing or wrong.
    """
    section = sole_rope_section(reader)
    theta = reader.number("rope_theta", theta)
    partial = reader.number("partial_rotary_factor", partial)
    # Phi-3 and some fine-tuned models have this key at the top level, where it takes precedence.
    original = reader.optional_integer("original_max_position_embeddings")
    beta = (section.optional_number("llama_4_scaling_beta") or 0.0) if growth else 0.0
    rope = read_rope_section(
        section,
        theta=theta,
        partial=partial,
        original=original,
        head_dim=head_dim,
        window_tokens=window_tokens,
    )
    if growth:
        # Beside the scaling's own parameters transformers writes the window once more.
        section.only("max_position_embeddings", (None, window_tokens), "it is the model's window")
    if not beta:
        return rope
    named = section.optional_integer("original_max_position_embeddings")
    return dataclasses.replace(rope, query_growth=beta, original_window_tokens=original or named or 0)


def read_ropes_by_layer(
    reader: ConfigReader, fields: Mapping[str, Any], bases: Mapping[str, float]
) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of full and of sliding layers, all over whole heads.

    Args:
      reader: at the top level of the config.
      fields: the model's `head_dim` and `window_tokens`.
      bases: of each kind of layer, if the config has none.
    """
    nested, scaling = reader.section("rope_parameters"), reader.section("rope_scaling")
    if nested and scaling:
        raise ConfigError(
            "the config has both 'rope_parameters' and 'rope_scaling', which would mix; keep the first"
        )
    # In the older spelling the scaling applies to full layers alone.
    sections = {
        FULL: nested.section(FULL) if nested else scaling,
        SLIDING: nested.section(SLIDING) if nested else None,
    }
    ropes = [
        read_rope_section(
            sections[kind] or ConfigReader({}),
            theta=bases[kind],
            head_dim=fields["head_dim"],
            window_tokens=fields["window_tokens"],
        )
        for kind in (FULL, SLIDING)
    ]
    for rope in ropes:
        refuse_partial(rope, fields["head_dim"])
    return ropes[0], ropes[1]


def sole_rope_section(reader: ConfigReader) -> ConfigReader:
    """The object under `rope_parameters` or `rope_scaling`, empty where there is neither."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if new and old:
        raise ConfigError(
            "the config has both 'rope_parameters' and 'rope_scaling', which versions of transformers read "
            "differently; keep one of them"
        )
    return new or old or ConfigReader({})


def read_rope_section(
    section: ConfigReader,
    *,
    theta: float,
    head_dim: int,
    window_tokens: int,
    partial: float = 1.0,
    original: int | None = None,
) -> RopeConfig:
    """One rotary embedding from its `rope_scaling` or `rope_parameters` object.

    Args:
      section: the object; it may be empty.
      theta: base if the object has none.
      head_dim: H.
      window_tokens: `max_position_embeddings`.
      partial: share of the head's dimensions that are rotated, if the object has none.
      original: window of pre-training, if it is known from outside of the object.
    """
    older_name = section.text("type", "default")
    kind = section.text("rope_type", older_name)
    if kind not in _KINDS:
        raise ConfigError(
            f"rope scaling {kind!r} is not supported; jaxllm reads {', '.join(_KINDS)}: use a checkpoint "
            "of the model without it"
        )
    named = section.optional_integer("original_max_position_embeddings")
    original = original or named or window_tokens
    if original < 1:
        raise ConfigError(f"rope scaling: the original window must be positive, got {original}; fix it")
    numbers = {key: section.optional_number(key) for key in _SCALING_NUMBERS}
    truncate = section.flag("truncate", True)
    theta = section.number("rope_theta", theta)
    partial = section.number("partial_rotary_factor", partial)
    if not 0 < partial <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, got {partial!r}; fix it")
    rope: dict[str, Any] = {"dim": int(head_dim * partial), "theta": theta}
    if kind == "default":
        return RopeConfig(**rope)
    factor = numbers["factor"]
    if factor is None and kind == "yarn":
        factor = window_tokens / original
    rope |= {"kind": kind, "factor": _given(kind, "factor", factor)}
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            rope[key] = _given(kind, key, numbers[key])
    if kind == "yarn":
        rope |= {
            # transformers takes zero for unset.
            "beta_fast": numbers["beta_fast"] or 32.0,
            "beta_slow": numbers["beta_slow"] or 1.0,
            "attention_factor": _yarn_attention_factor(rope["factor"], numbers),
            "truncate": truncate,
        }
    if kind in ("llama3", "yarn"):
        rope["original_window_tokens"] = original
    return RopeConfig(**rope)


def refuse_partial(rope: RopeConfig, head_dim: int) -> None:
    """Raises ConfigError for a rotary embedding that does not rotate all dimensions of the head."""
    if rope.dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {rope.dim} of {head_dim} head dimensions, but this model_type "
            "rotates all of them; remove the key"
        )


def write_partial_rope(rope: RopeConfig | None, head_dim: int) -> dict[str, Any]:
    """The keys of `write_rope`, and `partial_rotary_factor`, the share of a head's H dimensions that is
    rotated; none for no rotary embedding."""
    if rope is None:
        return {}
    # int(H · share) must be the number of dimensions, in floating point.
    exact = rope.dim / head_dim
    share = exact if int(head_dim * exact) == rope.dim else (rope.dim + 0.5) / head_dim
    return {**write_rope(rope), "partial_rotary_factor": share}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The keys `rope_theta` and, where there is a scaling, `rope_scaling`.

    Where an architecture rotates a share of the dimensions: `write_partial_rope`.
    """
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_window_tokens
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


_SCALING_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)


def _given(kind: str, key: str, value: float | None) -> float:
    if value is None:
        raise ConfigError(f"rope scaling {kind!r} lacks {key!r}; add it to the config")
    return value


def _yarn_attention_factor(factor: float, numbers: dict[str, float | None]) -> float:
    """The attention factor: as given, or YaRN's 0.1·ln(factor) + 1, or DeepSeek's ratio of two of these."""
    if (given := numbers["attention_factor"]) is not None:
        return given

    def growth(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = numbers["mscale"], numbers["mscale_all_dim"]
    return growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1.0)
