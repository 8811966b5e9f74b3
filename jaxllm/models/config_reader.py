"""Reads a Hugging Face config.json, and refuses unknown keys.

Every look-up records its key. A remaining key must be inert (without effect on logits at inference), null or
false, or named by the caller as one to ignore; any other is an error, because a partly understood config
loads and gives nonsense.
"""

import sys
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

from jaxllm.config import MAX_DIMENSION
from jaxllm.errors import ConfigError

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
          path: prefix of its keys in messages and in `ignore_keys` (`rope_scaling.` for a section).
          ignore_keys: keys to ignore at the user's request: unknown ones, and those that `only` would refuse.
        """
        self._config = config
        self._path = path
        self._ignored = ignore_keys
        self._known: set[str] = set()
        self._sections: list[ConfigReader] = []

    def integer(self, key: str, default: int, *, least: int = -MAX_DIMENSION) -> int:
        """A whole number of at least `least`."""
        bounds = "at most" if least < 0 else f"at least {least} and at most"

        # Bounded, because some values become the length of a list.
        def valid(value: Any) -> bool:
            return type(value) is int and least <= value <= MAX_DIMENSION

        return self._typed(key, default, valid, f"a whole number of {bounds} {MAX_DIMENSION}")

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None if the key is null."""
        return None if self._value(key, default) is None else self.integer(key, default or 0)

    def number(
        self, key: str, default: float, *, low: float = -sys.float_info.max, high: float = sys.float_info.max
    ) -> float:
        """A finite number in [`low`, `high`]."""
        bounds = "" if high == sys.float_info.max else f" in [{low:g}, {high:g}]"

        # False for NaN; `math.isfinite` would raise for integers that no float can represent.
        def valid(value: Any) -> bool:
            return type(value) in (int, float) and low <= value <= high

        return float(self._typed(key, default, valid, f"a finite number{bounds}"))

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A finite number, or None if the key is null."""
        return None if self._value(key, default) is None else self.number(key, default or 0.0)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null means false."""
        return (
            self._typed(key, default, lambda value: isinstance(value, bool | None), "true or false") is True
        )

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self._typed(key, default, lambda value: isinstance(value, str), "a string")

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
        found = self._list(key, lambda item: isinstance(item, str), "a list of strings")
        return None if found is None else tuple(found)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; empty if the key is absent or null."""
        wanted = f"a list of whole numbers of at most {MAX_DIMENSION}"
        return tuple(
            self._list(key, lambda item: type(item) is int and abs(item) <= MAX_DIMENSION, wanted) or ()
        )

    def section(self, key: str) -> "ConfigReader | None":
        """A nested object, or None if the key is absent, null or empty."""
        value = self._typed(key, None, lambda value: isinstance(value, dict | None), "an object")
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

    def _typed(self, key: str, default: Any, valid: Callable[[Any], bool], wanted: str) -> Any:
        value = self._value(key, default)
        if not valid(value):
            name = self._path + key
            raise ConfigError(f"config key {name!r} must be {wanted}, got {_short(value)}; fix it")
        return value

    def _list(self, key: str, valid: Callable[[Any], bool], wanted: str) -> list[Any] | None:
        def all_valid(value: Any) -> bool:
            return value is None or (isinstance(value, list) and all(map(valid, value)))

        return self._typed(key, None, all_valid, wanted)


def refuse_quantized(reader: ConfigReader) -> None:
    """Raises ConfigError for the config of a quantized checkpoint."""
    why = "quantized checkpoints are not read; take the float weights, which jaxllm quantizes itself"
    reader.only("quantization_config", (None,), why)


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        return "a number of thousands of digits"
    return shown if len(shown) <= 80 else shown[:77] + "..."
