"""All data of a tokenizer, and the model's recommended sampling, as stored in a bundle."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.sampling_state import MODEL_SAMPLING, Sampling
from jaxllm.text.library_tokenizer import MAX_TOKEN_ID

# Maximum number of start tokens of an encoder-decoder's decoder.
MAX_START_TOKENS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as plain data, for storage in a bundle.

    Fields:
      tokenizer_json: the text of a `tokenizer.json` of the `tokenizers` library.
      chat_template: the Jinja source of the chat template, or None.
      special: names that the chat template may use (`bos_token`, `eos_token`, `pad_token`, ...) -> their
        tokens.
      eos_ids: every token that ends an answer, the main one first; empty for none.
      bos_id: the token that begins a text, or None.
      start_ids: start tokens of the decoder of an encoder-decoder: its start token, and a forced first
        token, if any. At most `MAX_START_TOKENS`.
      source_prefix: default prefix of each source, which names the task (T5).
      tasks: prefixes of the tasks that the model was trained on, by name; a source that begins with one,
        even without its final space, gets no `source_prefix`.
      sampling: recommended options among `MODEL_SAMPLING`: the defaults of requests without their own.

    Raises:
      CheckpointError: a field is of the wrong type.
    """

    tokenizer_json: str
    chat_template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    start_ids: tuple[int, ...] = ()
    source_prefix: str = ""
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        template, special, ids = self.chat_template, self.special, self.eos_ids
        _require("tokenizer_json", isinstance(self.tokenizer_json, str), "text", self.tokenizer_json)
        _require("chat_template", template is None or isinstance(template, str), "text or null", template)
        named = isinstance(special, Mapping) and all(
            isinstance(text, str) for item in special.items() for text in item
        )
        _require("special", named, "a map from names to tokens", special)
        valid = isinstance(ids, tuple) and all(map(_is_token_id, ids))
        _require("eos_ids", valid, f"token ids in [0, {MAX_TOKEN_ID}]", ids)
        valid = self.bos_id is None or _is_token_id(self.bos_id)
        _require("bos_id", valid, f"null or a token id in [0, {MAX_TOKEN_ID}]", self.bos_id)
        ids, prefix = self.start_ids, self.source_prefix
        valid = isinstance(ids, tuple) and len(ids) <= MAX_START_TOKENS and all(map(_is_token_id, ids))
        _require("start_ids", valid, f"at most {MAX_START_TOKENS} token ids", ids)
        _require("source_prefix", isinstance(prefix, str), "text", prefix)
        tasks = self.tasks
        valid = isinstance(tasks, Mapping) and all(
            isinstance(each, str) and each.strip() for item in tasks.items() for each in item
        )
        _require("tasks", valid, "a map from names to texts that are not empty", tasks)
        sampling = self.sampling
        valid = isinstance(sampling, Mapping) and set(sampling) <= set(MODEL_SAMPLING)
        _require("sampling", valid, f"a map from some of {', '.join(MODEL_SAMPLING)} to numbers", sampling)
        try:
            Sampling(**self.sampling)  # pyright: ignore[reportArgumentType]: it checks them
        except ConfigError as error:
            raise CheckpointError(f"the model's own sampling cannot be used: {error}") from error

    def source_text(self, text: str, task: str = "") -> str:
        """The source of a user's text: with the prefix of a task, unless it begins with one.

        Args:
          text: the user's text.
          task: one of `tasks`; empty for `source_prefix`.

        Raises:
          ConfigError: there is no such task.
        """
        if not task:
            begun = text.startswith(tuple(each.strip() for each in self.tasks.values()))
            return text if begun else self.source_prefix + text
        if task not in self.tasks:
            there = f"there are {', '.join(self.tasks)}" if self.tasks else "its folder names none"
            raise ConfigError(f"the model has no task {task!r:.80}: {there}")
        prefix = self.tasks[task]
        return text if text.startswith(prefix.strip()) else prefix + text

    def to_json(self) -> dict[str, Any]:
        """The data as a plain dict for `from_json`."""
        data = {
            "tokenizer_json": self.tokenizer_json,
            "chat_template": self.chat_template,
            "special": dict(self.special),
            "eos_ids": list(self.eos_ids),
            "bos_id": self.bos_id,
        }
        # Most bundles omit these.
        own = {
            "start_ids": list(self.start_ids),
            "source_prefix": self.source_prefix,
            "tasks": dict(self.tasks),
            "sampling": dict(self.sampling),
        }
        return {**data, **{name: value for name, value in own.items() if value}}

    @classmethod
    def from_json(cls, data: Any) -> "TokenizerFiles":
        """Reads a dict made by `to_json`.

        Raises:
          CheckpointError: a key is unknown or missing, or a value is of the wrong type.
        """
        _require("the tokenizer", isinstance(data, dict), "a JSON object", data)
        fields = dict(data)
        for name in ("eos_ids", "start_ids"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        try:
            return cls(**fields)
        except TypeError as error:
            raise CheckpointError(
                f"malformed tokenizer: {one_line(error)}; prepare the bundle again"
            ) from error


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _require(name: str, condition: bool, allowed: str, value: Any) -> None:
    if not condition:
        raise CheckpointError(f"{name} must be {allowed}, got {value!r:.80}; prepare the model again")
