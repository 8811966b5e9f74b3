"""Reads a Hugging Face config.json, and refuses unknown keys."""

import dataclasses
import math
import sys
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from jaxllm.config import MAX_DIMENSION, RopeConfig
from jaxllm.errors import ConfigError

# Reads a Hugging Face `config.json` and refuses unknown keys.
#
# Every look-up records its key. A remaining key must be inert (without effect on logits at inference), null
# or false, or named by the caller as one to ignore; any other is an error, because a partly understood
# config loads and gives nonsense.


# Keys that do not change the logits.
# fmt: off
INERT_KEYS = frozenset({
    # Book-keeping.
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
    "_name_or_path", "_num_labels", "architectures", "attn_implementation", "auto_map",
    "cache_implementation", "chunk_size_feed_forward", "dtype", "finetuning_task", "is_decoder",
    "is_llama_config", "keys_to_ignore_at_inference", "max_sequence_length", "model_type",
    "_model_name_or_path", "name_or_path", "output_attentions", "output_hidden_states",
    "predict_special_tokens", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_cache",
    # Training; `pretraining_tp` divided products into parts of a sum.
    "pretraining_tp", "activation_dropout", "attention_dropout", "attn_pdrop", "classifier_dropout",
    "dropout", "embd_pdrop", "gradient_checkpointing", "hidden_dropout", "init_std", "initializer_range",
    "layerdrop", "output_router_logits", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise",
    # Token ids and labels.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "pad_token_id", "prefix", "sep_token_id", "unk_token_id", "id2label",
    "label2id", "num_labels", "problem_type",
    # Defaults for sampling.
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
})
# fmt: on

_MISSING = object()


class ConfigReader:
    """Typed look-ups in one JSON object that record the known keys.

    The default of an absent key is that of the Hugging Face class. A key with a value of the wrong type
    raises ConfigError.
    """

    def __init__(
        self, config: Mapping[str, Any], path: str = "", *, ignore_keys: Container[str] = ()
    ) -> None:
        """Reads a JSON object.

        Args:
          config: the object.
          path: prefix of its keys in messages and in `ignore_keys` (`rope_scaling.` for a section).
          ignore_keys: keys to ignore at the user's request: unknown ones, and those that `only` would refuse.
        """
        self._config = config
        self._path = path
        self._ignored = ignore_keys
        self._known: set[str] = set()
        self._sections: list[ConfigReader] = []

    def integer(self, key: str, default: int) -> int:
        """A whole number."""
        value = self._value(key, default)
        valid = isinstance(value, int) and not isinstance(value, bool)
        # Bounded, because some values become the length of a list.
        if not valid or abs(value) > MAX_DIMENSION:
            raise self._wrong(key, value, f"a whole number of at most {MAX_DIMENSION}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None if the key is null."""
        return None if self._value(key, default) is None else self.integer(key, default or 0)

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self._value(key, default)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN and infinities; `math.isfinite` would raise for integers that no float can represent.
        if not valid or not abs(value) <= sys.float_info.max:
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A finite number, or None if the key is null."""
        return None if self._value(key, default) is None else self.number(key, default or 0.0)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null means false."""
        value = self._value(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None if the key is absent or null."""
        return None if self._value(key, None) is None else self.text(key, "")

    def integer_or_text(self, key: str, default: int) -> int | str:
        """A whole number or a string; null means 0."""
        value = self._value(key, default)
        if value is None:
            return 0
        return self.text(key, "") if isinstance(value, str) else self.integer(key, default)

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None if the key is absent or null."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if the key is absent or null."""
        value = self._value(key, None)
        if value is None:
            return ()
        whole = isinstance(value, list) and all(type(item) is int for item in value)
        if not whole or any(abs(item) > MAX_DIMENSION for item in value):
            raise self._wrong(key, value, f"a list of whole numbers of at most {MAX_DIMENSION}")
        return tuple(value)

    def section(self, key: str) -> "ConfigReader | None":
        """A nested object, or None if the key is absent, null or empty."""
        value = self._value(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        if not value:
            return None
        nested = ConfigReader(value, f"{self._path}{key}.", ignore_keys=self._ignored)
        self._sections.append(nested)
        return nested

    def accept(self, key: str) -> None:
        """Accepts any value of a key without effect."""
        self._known.add(key)

    def keys(self) -> list[str]:
        """All keys of the object."""
        return list(self._config)

    def has(self, key: str) -> bool:
        """Whether the config has a value for `key`, other than null and an empty object."""
        return self._config.get(key) not in (None, {})

    def require(self, key: str, why: str) -> None:
        """Refuses a config without `key`."""
        if self._value(key, None) is None:
            raise ConfigError(f"config key {self._path + key!r} is missing: {why}")

    def only(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Refuses every value of `key` but those in `allowed`; an absent key is fine, and one to ignore."""
        if self._path + key in self._ignored:
            return
        value = self._value(key, _MISSING)
        # 1 == True in Python, but a config with one in place of the other is malformed.
        same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
        if value is not _MISSING and not same:
            choices = " or ".join(repr(each) for each in allowed)
            raise ConfigError(
                f"config key {self._path + key!r} is {_short(value)}; jaxllm supports only {choices}: {why}"
            )

    def finish(self, *, inert_keys: Collection[str] = ()) -> None:
        """Checks that no unread key could change the mathematics.

        Args:
          inert_keys: further keys that cannot change the logits.

        Raises:
          ConfigError: a key is unknown, or one to ignore is known and in use.
        """
        for key, value in self._config.items():
            name = self._path + key
            if key in self._known:
                if name in self._ignored:
                    raise ConfigError(
                        f"config key {name!r} is understood and in use, so it cannot be ignored; "
                        "take it off the list of ignored keys"
                    )
                continue
            # `is`, because 0 == False, and a zero may have a meaning.
            if key in INERT_KEYS or key in inert_keys or name in self._ignored:
                continue
            if value is not None and value is not False:
                raise ConfigError(
                    f"config key {name!r} (value {_short(value)}) is unknown for this model_type and may "
                    "change its mathematics; if you know that it does not, ignore it by `jaxllm prepare "
                    f"--ignore-config-key {name}` (ignore_keys=[{name!r}] in Python)"
                )
        for nested in self._sections:
            nested.finish()

    def _value(self, key: str, default: Any) -> Any:
        self._known.add(key)
        return self._config.get(key, default)

    def _wrong(self, key: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"config key {self._path + key!r} must be {wanted}, got {_short(value)}; fix it")


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        return "a number of thousands of digits"
    return shown if len(shown) <= 80 else shown[:77] + "..."


# Translates the kinds of layers between Hugging Face configs and ours: windows of attention, states.


SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(
    reader: ConfigReader, *, layers: int, window: int | None, slides: Sequence[bool]
) -> tuple[int, ...]:
    """`attention_windows` from `layer_types`, or from the architecture's usual pattern if the config has
    none.

    Args:
      reader: at the top level of the config.
      layers: L.
      window: window of sliding layers in tokens; None if the config switches it off.
      slides: the architecture's usual pattern, one entry per layer.

    Raises:
      ConfigError: `layer_types` has another length, an unknown type, or sliding layers and no window.
    """
    types = reader.texts("layer_types")
    if types is None:
        types = tuple(SLIDING if each else FULL for each in slides)
    if len(types) != layers:
        raise ConfigError(f"config key 'layer_types' has {len(types)} entries for {layers} layers; fix it")
    if unknown := sorted(set(types) - {SLIDING, FULL}):
        raise ConfigError(
            f"config key 'layer_types' names {', '.join(unknown)}; jaxllm supports {SLIDING} and {FULL}"
        )
    if SLIDING in types and (window is None or window < 1):
        raise ConfigError(
            f"config key 'layer_types' has sliding layers but the window is {window}; set sliding_window "
            "to a positive length (and use_sliding_window to true where the model has it)"
        )
    return tuple((window or 0) if each == SLIDING else 0 for each in types)


def write_layer_types(windows: Sequence[int]) -> list[str]:
    """`layer_types` of `attention_windows`."""
    return [SLIDING if each else FULL for each in windows]


def read_state_layers(reader: ConfigReader, state: str, usual: Sequence[bool]) -> tuple[bool, ...]:
    """`state_layers` from `layer_types`, or the architecture's default if the config has none; empty if all
    layers attend.

    Args:
      reader: reader of the top level of the config.
      state: type name of a state layer.
      usual: default per layer, whether it has a state.

    Raises:
      ConfigError: `layer_types` has another length or an unknown type.
    """
    types = reader.texts("layer_types")
    if types is None:
        return _marked(usual)
    if len(types) != len(usual):
        raise ConfigError(
            f"config key 'layer_types' has {len(types)} entries for {len(usual)} layers; fix it"
        )
    if unknown := sorted(set(types) - {state, FULL}):
        raise ConfigError(
            f"config key 'layer_types' names {', '.join(unknown)}; this model_type has {state} and {FULL}"
        )
    return _marked(each == state for each in types)


def write_state_types(state_layers: Sequence[bool], layers: int, state: str) -> list[str]:
    """`layer_types` of `state_layers`."""
    return [state if each else FULL for each in state_layers or (False,) * layers]


def _marked(flags: Iterable[bool]) -> tuple[bool, ...]:
    found = tuple(flags)
    return found if any(found) else ()


# Translates rotary embeddings between Hugging Face configs and `RopeConfig`.
#
# Two spellings exist: top-level `rope_theta` with an optional `rope_scaling` object, and since transformers
# 5 one `rope_parameters` object with both. Both are read, with transformers' precedence; the older one is
# written because every version of transformers reads it.


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
      reader: reader of the top level of the config.
      head_dim: H.
      window_tokens: `max_position_embeddings`, the default of a scaling's original window.
      theta: default base.
      partial: default share of rotated head dimensions.
      growth: whether queries may grow with the position (`llama_4_scaling_beta`).

    Raises:
      ConfigError: a scaling kind that is not supported, or one whose numbers are missing or wrong.
    """
    section = sole_rope_section(reader)
    theta = reader.number("rope_theta", theta)
    partial = reader.number("partial_rotary_factor", partial)
    # Phi-3 and some fine-tuned models have this key at the top level, with precedence.
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
      bases: base of each kind of layer, if the config has none.
    """
    nested, scaling = reader.section("rope_parameters"), reader.section("rope_scaling")
    if nested and scaling:
        raise ConfigError(
            "the config has both 'rope_parameters' and 'rope_scaling', which would mix; keep the first"
        )
    # In the older spelling the scaling only applies to full layers.
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
    """The object under `rope_parameters` or `rope_scaling`, empty if there is neither."""
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
      theta: default base.
      head_dim: H.
      window_tokens: `max_position_embeddings`.
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
            # transformers treats zero as unset.
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
    """The keys of `write_rope`, and `partial_rotary_factor`, the share of rotated dimensions of a head's H;
    none without a rotary embedding."""
    if rope is None:
        return {}
    # int(H · share) must be the number of dimensions, in floating point.
    exact = rope.dim / head_dim
    share = exact if int(head_dim * exact) == rope.dim else (rope.dim + 0.5) / head_dim
    return {**write_rope(rope), "partial_rotary_factor": share}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """The keys `rope_theta` and, if there is a scaling, `rope_scaling`.

    For architectures that rotate a share of the dimensions, use `write_partial_rope`.
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
