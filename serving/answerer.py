"""What every engine does with a request before its graphs or programs see it: text to tokens, and a seed."""

import abc
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tokenizer import Tokenizer
from serving.generation import Decoder, Generation, GenerationConfig, Session
from serving.sliding import Sliding

Message = Mapping[str, str]


class Answerer(abc.ABC):
    """Answers prompts and conversations.

    Every engine has one lock, its levels' too: for each piece of an answer, for getting ready, for a change
    of weights and for closing. Threads may share an engine, then, and its answers come as they would one by
    one; they take turns, because a device computes no faster for two. A session is one thread's at a time.

    Attributes:
      tokenizer: the model's tokenizer.
      table: what answers are made with.
    """

    tokenizer: Tokenizer
    table: Any

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The model's name, for people."""

    @abc.abstractmethod
    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
    ) -> Generation:
        """Answers a prompt: text (special tokens are added) or token ids.

        Args:
          prompt: what the model continues.
          config: length, stops and sampling of the answer.
          session: a conversation whose cache is used and extended.

        Raises:
          ConfigError, ContextOverflow: the prompt is empty, malformed or too long.
        """

    def generate(self, prompt: str | Sequence[int], config: GenerationConfig | None = None) -> Generation:
        """`stream`, run to the end."""
        return self.stream(prompt, config).result()

    def chat(
        self,
        messages: Sequence[Message],
        config: GenerationConfig | None = None,
        *,
        session: Session | None = None,
    ) -> Generation:
        """Answers a conversation of {"role", "content"} messages through the model's chat template."""
        tokenizer = self.tokenizer.limited(self.table.options.context_tokens)
        prompt = tokenizer.encode_chat(list(messages), now=datetime.now())
        return self.stream(prompt, config, session=session)

    def _answer(
        self,
        table: Decoder,
        prompt: str | Sequence[int],
        config: GenerationConfig | None,
        session: Session | None,
        sliding: Sliding | None = None,
        tpot_ms: float | None = None,
    ) -> Generation:
        """An answer that `table` makes (see `stream`)."""
        table.require_usable()
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty; give it at least one character")
            prompt = self.tokenizer.limited(table.options.context_tokens).encode(prompt)
        config = config or GenerationConfig()
        seed = config.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed
        session = Session() if session is None else session
        return Generation(table, self.tokenizer, session, prompt, config, seed, sliding, tpot_ms)
