"""All data of a tokenizer, and the model's recommended sampling, as stored in a bundle."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import CheckpointError, ConfigError, one_line
from jaxllm.sampling_state import MODEL_SAMPLING, Sampling
from jaxllm.text.library_tokenizer import MAX_TOKEN_ID

# Name of the template of conversations with tools.
TOOLS_TEMPLATE = "tool_use"
MAX_TEMPLATES = 16
# Maximum number of start tokens of an encoder-decoder's decoder.
MAX_START_TOKENS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as plain data, for storage in a bundle.

    Fields:
      tokenizer_json: the text of a `tokenizer.json` of the `tokenizers` library.
      chat_template: the Jinja source of the chat template, or None.
      templates: further chat templates by name, such as `tool_use`.
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
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    special: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    start_ids: tuple[int, ...] = ()
    source_prefix: str = ""
    tasks: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ids = f"in [0, {MAX_TOKEN_ID}]"
        tasks, sampling = self.tasks, self.sampling
        for name, valid, allowed in (
            ("tokenizer_json", isinstance(self.tokenizer_json, str), "text"),
            ("chat_template", isinstance(self.chat_template, str | None), "text or null"),
            (
                "templates", _are_texts(self.templates) and len(self.templates) <= MAX_TEMPLATES,
                f"a map from at most {MAX_TEMPLATES} names to templates",
            ),
            ("special", _are_texts(self.special), "a map from names to tokens"),
            ("eos_ids", _are_token_ids(self.eos_ids), f"token ids {ids}"),
            ("bos_id", self.bos_id is None or _are_token_ids((self.bos_id,)), f"null or a token id {ids}"),
            (
                "start_ids", _are_token_ids(self.start_ids) and len(self.start_ids) <= MAX_START_TOKENS,
                f"at most {MAX_START_TOKENS} token ids",
            ),
            ("source_prefix", isinstance(self.source_prefix, str), "text"),
            (
                "tasks", _are_texts(tasks) and all(each.strip() for item in tasks.items() for each in item),
                "a map from names to texts that are not empty",
            ),
            (
                "sampling", isinstance(sampling, Mapping) and set(sampling) <= set(MODEL_SAMPLING),
                f"a map from some of {', '.join(MODEL_SAMPLING)} to numbers",
            ),
        ):  # fmt: skip
            _require(name, valid, allowed, getattr(self, name))
        try:
            Sampling(**self.sampling)  # pyright: ignore[reportArgumentType]: it checks them
        except ConfigError as error:
            raise CheckpointError(f"the model's own sampling cannot be used: {error}") from error

    def source_text(self, text: str, task: str = "") -> str:
        """The source of a user's text: with the prefix of a task, unless it begins with one.

        Args:
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
        data = dataclasses.asdict(self)
        # Most bundles omit these.
        rare = ("templates", "start_ids", "source_prefix", "tasks", "sampling")
        return {name: value for name, value in data.items() if value or name not in rare}

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


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(each) is int and 0 <= each <= MAX_TOKEN_ID for each in value)


def _are_texts(value: Any) -> bool:
    items = value.items() if isinstance(value, Mapping) else [(value, None)]
    return all(isinstance(each, str) for item in items for each in item)


def _require(name: str, condition: bool, allowed: str, value: Any) -> None:
    if not condition:
        raise CheckpointError(f"{name} must be {allowed}, got {value!r:.80}; prepare the model again")
