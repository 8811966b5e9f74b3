"""Parts of a config.json that architectures share: keys, windows of attention, rotary embeddings, experts.

Each part reads fields of `ModelConfig`, and writes them back.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jaxllm.config import Activation, ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import StateConfig, StateKind
from jaxllm.models.config_reader import ConfigReader

Fields = dict[str, Any]
_Choice = TypeVar("_Choice")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Part:
    """Some keys of a config.json.

    Attributes:
      read: function of the config and the fields of the parts before, which returns fields of `ModelConfig`
        (those of earlier parts may be replaced).
      write: the inverse, the keys of a model's config.
    """

    read: Callable[[ConfigReader, Fields], Fields]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda cfg: {}


_TYPES = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
# Numbers without effect at zero, for which configs have null.
_OFF_AT_ZERO = {
    field.name for field in dataclasses.fields(ModelConfig) if field.type is float and field.default == 0.0
}


def keys(**named: tuple[Any, ...]) -> Part:
    """Keys with the values of fields: `key=(default, *fields)`.

    The default is that of the Hugging Face class. A key has the type of its first field. `kv_heads` and
    `head_dim` may be null, and follow from the heads.
    """

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        found: Fields = {}
        for key, (default, *names) in named.items():
            found |= dict.fromkeys(names, _read_key(reader, key, default, names[0]))
        if "heads" in found:
            found["kv_heads"] = _else(found.get("kv_heads"), found["heads"])
            if found.get("head_dim") is None:
                found["head_dim"] = split_heads(found["hidden_size"], found["heads"])
        return found

    def write(cfg: ModelConfig) -> dict[str, Any]:
        return {key: _written(cfg, names[0]) for key, (_, *names) in named.items()}

    return Part(read, write)


def _read_key(reader: ConfigReader, key: str, default: Any, field: str) -> Any:
    if field in ("kv_heads", "head_dim"):
        return reader.optional_integer(key, default)
    if field in _OFF_AT_ZERO:
        return reader.optional_number(key, default) or 0.0
    if field == "activation":
        return read_activation(reader, key, default)
    return {bool: reader.flag, int: reader.integer, float: reader.number}[_TYPES[field]](key, default)


def _written(cfg: ModelConfig, field: str) -> Any:
    value = getattr(cfg, field)
    if field in _OFF_AT_ZERO:
        return value or None
    return write_activation(value) if field == "activation" else value


def _else(value: Any, other: Any) -> Any:
    return other if value is None else value


def split_heads(hidden_size: int, heads: int) -> int:
    """Head size of a config without `head_dim`.

    Raises:
      ConfigError: the hidden size does not divide into heads.
    """
    if heads < 1 or hidden_size < heads or hidden_size % heads:
        raise ConfigError(
            f"hidden size {hidden_size} does not divide into {heads} heads; correct the config or give "
            "its head_dim"
        )
    return hidden_size // heads


def fixed(**fields: Any) -> Part:
    """Fields that all models of an architecture have in common."""
    return Part(lambda reader, found: fields)


def only(key: str, allowed: Collection[Any] | Callable[[Fields], Collection[Any]], why: str) -> Part:
    """Refuses every value of `key` but those in `allowed` (see `ConfigReader.only`), or those that it returns
    for the fields of earlier parts."""

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        reader.only(key, allowed(fields) if callable(allowed) else allowed, why)
        return {}

    return Part(read)


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def read_choice(reader: ConfigReader, key: str, default: str, choices: Mapping[str, _Choice]) -> _Choice:
    """The choice named by `key`.

    Raises:
      ConfigError: there is none of this name.
    """
    name = reader.text(key, default)
    if name not in choices:
        raise ConfigError(
            f"config key {key!r} is {name!r:.80}, which is not supported; jaxllm has {', '.join(choices)}"
        )
    return choices[name]


def read_activation(reader: ConfigReader, key: str, default: str) -> Activation:
    """The feed-forward non-linearity named by `key`."""
    return read_choice(reader, key, default, _ACTIVATIONS)


def write_activation(activation: Activation) -> str:
    """Hugging Face's name of a non-linearity; configs of gpt-oss name silu, although its experts are
    clamped."""
    return {"gelu_tanh": "gelu_pytorch_tanh", "clamped_swiglu": "silu"}.get(activation, activation)


def read_layer_types(
    reader: ConfigReader, usual: Sequence[str], allowed: tuple[str, str], of: str
) -> list[str]:
    """The type of each layer from `layer_types`, or `usual` without this key.

    Args:
      usual: the architecture's default, one entry per layer.
      allowed: names of the types.
      of: subject of the message, such as "jaxllm supports".

    Raises:
      ConfigError: `layer_types` has another length or an unknown type.
    """
    types = _else(reader.texts("layer_types"), usual)
    if len(types) != len(usual):
        raise ConfigError(
            f"config key 'layer_types' has {len(types)} entries for {len(usual)} layers; fix it"
        )
    if unknown := sorted(set(types) - set(allowed)):
        raise ConfigError(
            f"config key 'layer_types' names {', '.join(unknown)}; {of} {' and '.join(allowed)}"
        )
    return types


def read_windows(reader: ConfigReader, window: int | None, slides: Sequence[bool]) -> tuple[int, ...]:
    """`attention_windows` from `layer_types`, or from the architecture's usual pattern if the config has
    none.

    Args:
      window: window of sliding layers in tokens; None if the config switches it off.
      slides: the architecture's usual pattern, one entry per layer.

    Raises:
      ConfigError: `layer_types` has another length, an unknown type, or sliding layers and no window.
    """
    usual = [SLIDING if each else FULL for each in slides]
    types = read_layer_types(reader, usual, (SLIDING, FULL), "jaxllm supports")
    if SLIDING in types and (window is None or window < 1):
        raise ConfigError(
            f"config key 'layer_types' has sliding layers but the window is {window}; set sliding_window "
            "to a positive length (and use_sliding_window to true where the model has it)"
        )
    return tuple((window or 0) if each == SLIDING else 0 for each in types)


def write_windows(cfg: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    types = [SLIDING if each else FULL for each in cfg.attention_windows]
    return {"sliding_window": max(cfg.attention_windows) or None, "layer_types": types}


def all_but_each(number: int, layers: int) -> list[bool]:
    """Per layer, False for each `number`-th one, else True."""
    return [(layer + 1) % number != 0 for layer in range(layers)]


def every_other(reader: ConfigReader, fields: Fields) -> list[bool]:
    """Layers 0, 2, 4 and so on, for `windows`."""
    return [layer % 2 == 0 for layer in range(fields["layers"])]


def windows(
    default: int | None = None,
    slides: Callable[[ConfigReader, Fields], Sequence[bool]] | None = None,
    *,
    switch: bool = False,
) -> Part:
    """Windows of some layers, or one for all layers or none.

    Args:
      default: default length in tokens.
      slides: the architecture's usual pattern (see `read_windows`), from the config and earlier fields; None
        for one window, without `layer_types`.
      switch: whether windows are only used if `use_sliding_window` is true.
    """

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        window = reader.optional_integer("sliding_window", default)
        usual = () if slides is None else slides(reader, fields)
        if switch and (not reader.flag("use_sliding_window", False) or window is None):
            window, usual = None, [False] * len(usual)
        if slides is None:
            return {"attention_windows": (window or 0,) * fields["layers"]}
        return {"attention_windows": read_windows(reader, window, usual)}

    def write(cfg: ModelConfig) -> dict[str, Any]:
        switched = {"use_sliding_window": any(cfg.attention_windows)} if switch else {}
        written = {**switched, **write_windows(cfg)}
        return written if slides else {key: each for key, each in written.items() if key != "layer_types"}

    return Part(read, write)


def state_layers(
    kind: StateKind,
    name: str,
    usual: Callable[[ConfigReader, Fields], Sequence[bool]],
    **named: tuple[str, int | bool],
) -> Part:
    """Layers with states of this kind, which `layer_types` calls `name`, or the `usual` ones; `named` has the
    key and the default of each size in `StateConfig`."""

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        types = [name if each else FULL for each in usual(reader, fields)]
        sizes: Fields = {
            field: reader.flag(key, default) if isinstance(default, bool) else reader.integer(key, default)
            for field, (key, default) in named.items()
        }
        types = read_layer_types(reader, types, (name, FULL), "this model_type has")
        marked = tuple(each == name for each in types)
        return {"states": StateConfig(kind=kind, **sizes), "state_layers": marked} if any(marked) else {}

    def write(cfg: ModelConfig) -> dict[str, Any]:
        written = {key: getattr(cfg.states, field) for field, (key, _) in named.items() if cfg.states}
        types = [name if each else FULL for each in cfg.state_layers or (False,) * cfg.layers]
        return {**written, "layer_types": types}

    return Part(read, write)


def experts(key: str, default: int) -> Part:
    """Number of experts of a layer, under the key `num_local_experts` or `num_experts`; both are read.

    Raises:
      ConfigError: the number is 0, or both keys exist and differ.
    """

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        local, named = (reader.optional_integer(each) for each in ("num_local_experts", "num_experts"))
        if None not in (local, named) and local != named:
            raise ConfigError(
                f"config keys 'num_local_experts' ({local}) and 'num_experts' ({named}) are one number; keep "
                "one"
            )
        count = _else(_else(local, named), default)
        if count < 1:
            raise ConfigError(
                f"the config has {count} experts; a model without experts takes its dense family's model_type"
            )
        return {"experts": count}

    return Part(read, lambda cfg: {key: cfg.experts})


def _read_sparse_layers(reader: ConfigReader, fields: Fields) -> Fields:
    # Every `decoder_sparse_step`-th layer, without those of `mlp_only_layers`.
    step = reader.integer("decoder_sparse_step", 1, least=1)
    dense = set(reader.integers("mlp_only_layers"))
    marked = (layer not in dense and (layer + 1) % step == 0 for layer in range(fields["layers"]))
    return {"sparse_layers": tuple(marked)}


SPARSE_LAYERS = Part(
    _read_sparse_layers,
    lambda cfg: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(cfg.layers) if not cfg.is_sparse(layer)],
    },
)


# Rotary embeddings.
#
# Two spellings exist: top-level `rope_theta` with an optional `rope_scaling` object, and since transformers
# 5 one `rope_parameters` object with both. Both are read, with transformers' precedence; the older one is
# written because every version of transformers reads it.


def rope(theta: float = 10000.0, *, usual: Mapping[str, Any] | None = None, growth: bool = False) -> Part:
    """One rotary embedding over whole heads; `usual` is the scaling of a config without any, and with
    `growth` queries may grow with the position."""

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        found = read_rope(reader, fields, theta=theta, usual=usual, growth=growth)
        refuse_partial(found, fields["head_dim"])
        return {"rope": found}

    # Without a section the usual scaling would apply.
    plain = {} if usual is None else {"rope_scaling": {"rope_type": "default"}}
    return Part(read, lambda cfg: {**plain, **write_rope(cfg.rope)})


def partial_rope(share: float = 1.0) -> Part:
    """One rotary embedding, over this share of a head's dimensions by default."""

    def write(cfg: ModelConfig) -> dict[str, Any]:
        if cfg.rope is None:
            return {}
        # int(H · share) must be the number of dimensions, in floating point.
        exact = cfg.rope.dim / cfg.head_dim
        fits = int(cfg.head_dim * exact) == cfg.rope.dim
        share = exact if fits else (cfg.rope.dim + 0.5) / cfg.head_dim
        return {**write_rope(cfg.rope), "partial_rotary_factor": share}

    return Part(lambda reader, fields: {"rope": read_rope(reader, fields, partial=share)}, write)


def read_rope(
    reader: ConfigReader,
    fields: Fields,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    usual: Mapping[str, Any] | None = None,
    growth: bool = False,
) -> RopeConfig:
    """The one rotary embedding of a model.

    Args:
      fields: the model's `head_dim` and `window_tokens`, the default of a scaling's original window.
      theta: default base.
      partial: default share of rotated head dimensions.
      usual: scaling of a config without any.
      growth: whether queries may grow with the position (`llama_4_scaling_beta`).

    Raises:
      ConfigError: a scaling kind that is not supported, or one whose numbers are missing or wrong.
    """
    new, old = _rope_sections(reader)
    section = new or old or ConfigReader(usual or {})
    # A usual scaling with a base has precedence over keys at the top level, which are refused as unknown.
    outer = ConfigReader({}) if not (new or old) and "rope_theta" in (usual or {}) else reader
    theta = outer.number("rope_theta", theta)
    partial = outer.number("partial_rotary_factor", partial)
    # Phi-3 and some fine-tuned models have this key at the top level, with precedence.
    original = outer.optional_integer("original_max_position_embeddings")
    beta = (section.optional_number("llama_4_scaling_beta") or 0.0) if growth else 0.0
    found = read_rope_section(section, fields, theta=theta, partial=partial, original=original)
    if growth:
        # Beside the scaling's own parameters transformers writes the window once more.
        window = fields["window_tokens"]
        section.only("max_position_embeddings", (None, window), "it is the model's window")
    if not beta:
        return found
    named = section.optional_integer("original_max_position_embeddings")
    return dataclasses.replace(found, query_growth=beta, original_window_tokens=original or named or 0)


def ropes_by_layer(full: float, key: str = "", sliding: float = 0.0) -> Part:
    """The rotary embeddings of full and of sliding layers, over whole heads, with these default bases; that
    of sliding layers has the `key`, or is the one of full layers."""

    def read(reader: ConfigReader, fields: Fields) -> Fields:
        base, (nested, scaling) = reader.number("rope_theta", full), _rope_sections(reader)
        # In the older spelling the scaling only applies to full layers.
        sections = (
            (nested.section(FULL) if nested else scaling, base),
            (nested.section(SLIDING) if nested else None, reader.number(key, sliding) if key else base),
        )
        ropes = [read_rope_section(each or ConfigReader({}), fields, theta=base) for each, base in sections]
        for each in ropes:
            refuse_partial(each, fields["head_dim"])
        return {"rope": ropes[0], "local_rope": ropes[1]}

    def write(cfg: ModelConfig) -> dict[str, Any]:
        if key:
            return write_rope(cfg.rope) | ({} if cfg.local_rope is None else {key: cfg.local_rope.theta})
        ropes = {FULL: cfg.rope, SLIDING: cfg.local_rope}
        return {"rope_parameters": {kind: rope_parameters(each) for kind, each in ropes.items() if each}}

    return Part(read, write)


def _rope_sections(reader: ConfigReader) -> tuple[ConfigReader | None, ConfigReader | None]:
    """The objects under `rope_parameters` and `rope_scaling`, one of them None."""
    new, old = reader.section("rope_parameters"), reader.section("rope_scaling")
    if new and old:
        raise ConfigError(
            "the config has both 'rope_parameters' and 'rope_scaling', which versions of transformers read "
            "differently; keep one of them"
        )
    return new, old


_KINDS = ("default", "linear", "llama3", "yarn")
_SCALING_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip


def read_rope_section(
    section: ConfigReader,
    fields: Mapping[str, Any],
    *,
    theta: float,
    partial: float = 1.0,
    original: int | None = None,
) -> RopeConfig:
    """One rotary embedding from its `rope_scaling` or `rope_parameters` object.

    Args:
      section: the object; it may be empty.
      fields: the model's `head_dim` and `window_tokens`.
      theta: default base.
      partial: default share of rotated head dimensions.
      original: window of pre-training, if known from outside of the object.
    """
    older_name = section.text("type", "default")
    kind = section.text("rope_type", older_name)
    if kind not in _KINDS:
        raise ConfigError(
            f"rope scaling {kind!r} is not supported; jaxllm reads {', '.join(_KINDS)}: use a checkpoint "
            "of the model without it"
        )
    named = section.optional_integer("original_max_position_embeddings")
    window: int = fields["window_tokens"]
    original = original or named or window
    if original < 1:
        raise ConfigError(f"rope scaling: the original window must be positive, got {original}; fix it")
    numbers = {key: section.optional_number(key) for key in _SCALING_NUMBERS}
    truncate = section.flag("truncate", True)
    theta = section.number("rope_theta", theta)
    partial = section.number("partial_rotary_factor", partial)
    if not 0 < partial <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, got {partial!r}; fix it")
    found: Fields = {"dim": int(fields["head_dim"] * partial), "theta": theta}
    if kind == "default":
        return RopeConfig(**found)
    factor = numbers["factor"]
    if factor is None and kind == "yarn":
        factor = window / original
    found |= {"kind": kind, "factor": _given(kind, "factor", factor)}
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            found[key] = _given(kind, key, numbers[key])
    if kind == "yarn":
        found |= {
            # transformers treats zero as unset.
            "beta_fast": numbers["beta_fast"] or 32.0,
            "beta_slow": numbers["beta_slow"] or 1.0,
            "attention_factor": _yarn_attention_factor(found["factor"], numbers),
            "truncate": truncate,
        }
    if kind in ("llama3", "yarn"):
        found["original_window_tokens"] = original
    return RopeConfig(**found)


def refuse_partial(found: RopeConfig, head_dim: int) -> None:
    """Raises ConfigError for a rotary embedding that does not rotate all dimensions of the head."""
    if found.dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor rotates {found.dim} of {head_dim} head dimensions, but this model_type "
            "rotates all of them; remove the key"
        )


def write_rope(found: RopeConfig | None) -> dict[str, Any]:
    """The keys `rope_theta` and, if there is a scaling, `rope_scaling`; none without a rotary embedding."""
    if found is None:
        return {}
    if found.kind == "default":
        return {"rope_theta": found.theta}
    names = ("factor",)
    if found.kind == "llama3":
        names += ("low_freq_factor", "high_freq_factor")
    if found.kind == "yarn":
        names += ("beta_fast", "beta_slow", "attention_factor", "truncate")
    scaling: dict[str, Any] = {"rope_type": found.kind, **{name: getattr(found, name) for name in names}}
    if found.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = found.original_window_tokens
    return {"rope_theta": found.theta, "rope_scaling": scaling}


def rope_parameters(found: RopeConfig) -> dict[str, Any]:
    """A rotary embedding as an object `rope_parameters`."""
    written = write_rope(found)
    return {"rope_type": "default", **written.get("rope_scaling", {}), "rope_theta": written["rope_theta"]}


def _given(kind: str, key: str, value: float | None) -> float:
    if value is None:
        raise ConfigError(f"rope scaling {kind!r} lacks {key!r}; add it to the config")
    return value


def _yarn_attention_factor(factor: float, numbers: Mapping[str, float | None]) -> float:
    """The attention factor: as given, or YaRN's 0.1·ln(factor) + 1, or DeepSeek's ratio of two of these."""
    if (given := numbers["attention_factor"]) is not None:
        return given

    def growth(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = numbers["mscale"], numbers["mscale_all_dim"]
    return growth(mscale) / growth(mscale_all) if mscale and mscale_all else growth(1.0)
