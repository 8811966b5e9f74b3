"""Names what apps are told of the model, of its adapters and of their contexts. Frozen and free of arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the front tells of the model.

    Attributes:
      name: for people and `model` fields.
      window_tokens: most tokens of prompt and answer together.
      vocab_size: number of token ids.
      levels: served, in percent, ascending.
      has_chat_template: whether conversations can be answered.
      adapters: names of the low-rank adapters that calls may name.
      opened_s: when it was opened, in seconds since 1970.
      chat_template: its source, in Jinja, which tells how the model writes calls of tools; empty for none.
      images: whether conversations may have images.
    """

    name: str
    window_tokens: int
    vocab_size: int
    levels: tuple[int, ...]
    has_chat_template: bool
    adapters: tuple[str, ...]
    opened_s: float
    chat_template: str = ""
    images: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """A low-rank adapter that calls may name.

    Attributes:
      name: for calls.
      digest: of its arrays and scaling, in hex; contexts are kept by it.
      size_bytes: of its factors in memory, at all levels.
      loaded_s: seconds since 1970.
    """

    name: str
    digest: str
    size_bytes: int
    loaded_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFacts:
    """A context of an app.

    Attributes:
      name: unique in the store.
      tokens: number of its tokens.
      level: that answers in it, in percent.
      pinned: whether its chunks stay in memory.
      stored_bytes: of its chunks on storage.
      created_s: seconds since 1970; 0 where it is not known.
      adapter: the name of the low-rank adapter that answers in it; its digest where it is not loaded, empty
        for none.
    """

    name: str
    tokens: int
    level: int
    pinned: bool
    stored_bytes: int
    created_s: float = 0.0
    adapter: str = ""
