"""Contexts of apps, as callers see them.

context = service.new_context("mail")             newLLMCtx in the paper (LLMS, section 3.1)
for piece in context.generate("Dear ..."): ...    callLLM
context.delete()                                  delLLMCtx
"""

from collections.abc import Sequence
from datetime import datetime

from jaxllm.errors import ConfigError
from jaxllm.sampling_state import Sampling
from serving.contexts.answer import ContextAnswer, ContextCall
from serving.contexts.growth import slid_record
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.turn_ids import TurnTokens, turn_ids
from serving.prompt_rows import PromptRows
from serving.request import DEFAULT_MAX_TOKENS, GenerationConfig
from serving.sliding import Sliding, kept_tokens


class Context:
    """A context of an app.

    Attributes:
      app: that owns it.
      name: unique in the store; finds the context again after a restart.
    """

    def __init__(self, contexts: Contexts, record: Record) -> None:
        self._contexts, self.app, self.name = contexts, record.app, record.name

    @property
    def record(self) -> Record:
        """The stored record.

        Raises:
          ContextGone: it was deleted, or its tokens are of another tokenizer.
        """
        return self._contexts.record(self.app, self.name)

    @property
    def level(self) -> int:
        """The sub-model that answers in it, in percent."""
        return self.record.origin.level

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the context; of an encoder-decoder those of its decoder."""
        return self.record.tokens

    @property
    def source(self) -> tuple[int, ...]:
        """Of an encoder-decoder, the tokens that its encoder reads: the first prompt's. Empty before, and of
        other models."""
        return self.record.source

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        instruction: str = "",
        max_tokens: int = DEFAULT_MAX_TOKENS,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        slide: bool = False,
        sampling: Sampling | None = None,
        rows: PromptRows | None = None,
    ) -> ContextAnswer:
        """Answers a prompt that follows the context's tokens.

        The first prompt of an encoder-decoder is the context's source; a later one is what its decoder says
        next, before it goes on by itself, and may be empty.

        Args:
          prompt: the user's text; or token ids, which are taken as they are.
          instruction: stands before everything; only in the first call.
          max_tokens: most tokens of the answer.
          stop: strings that end it.
          ignore_eos: go on past the model's end tokens.
          slide: where context, prompt and answer outgrow the model's window, drop the middle of the context
            (see `serving.sliding`). The stored context changes only when the answer has ended.
          sampling: how tokens are chosen; greedy by default.
          rows: that stand in place of some tokens of a prompt of ids, at places counted from its first. They
            are stored with the context, which then does not slide, nor move to another model.

        Returns:
          The answer. Its first piece raises BudgetExceeded where the context would not fit into memory, its
          last where the context cannot be stored; the context is then as it was before the call.

        Raises:
          ContextGone: see `record`.
          ConfigError: the prompt is empty or malformed, or an instruction comes after the first call.
          ContextOverflow: the context and the prompt are longer than the model's window.
        """
        contexts, name = self._contexts, self.name
        contexts.ready(name)
        engine, record = contexts.engine, self.record
        now = datetime.now()
        if isinstance(prompt, str):
            tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
            prompt = turn_ids(tokenizer, record.tokens, prompt, instruction, now=now)
        elif instruction:
            raise ConfigError("an instruction comes with a prompt of text, not with token ids")
        if not prompt and not record.source:
            raise ConfigError("the prompt is empty; give it at least one token of text")
        base, sliding = record, None
        if slide:
            base = self._slid(record, len(prompt))
            sliding = Sliding(sink_tokens=engine.options.kv_chunk_tokens)
        asked = TurnTokens.after(base, base.tokens, prompt, engine.tokenizer, engine.cfg)
        config = GenerationConfig(
            max_tokens=max_tokens, stop=tuple(stop), ignore_eos=ignore_eos, sampling=sampling or Sampling()
        )
        rows = PromptRows.joined((0, contexts.rows_before(record)), (len(base.tokens), rows))
        request = engine.request(
            asked.prompt, config, level=record.origin.level, sliding=sliding, rows=rows, source=asked.source
        )
        call = ContextCall(contexts, record, base, most_tokens=len(request.prompt) + max_tokens)
        return ContextAnswer(engine.decoding(request), engine.tokenizer, request, call=call)

    def _slid(self, record: Record, prompt_tokens: int) -> Record:
        """The record after sliding, where the context and a prompt outgrow the window."""
        options = self._contexts.engine.options
        room = max(0, options.context_tokens - prompt_tokens)
        if len(record.tokens) <= room:
            return record
        most = min(room, kept_tokens(options.context_tokens))
        return slid_record(record, chunk_tokens=options.kv_chunk_tokens, most=most)

    def pin(self, pinned: bool = True) -> None:
        """Keeps its chunks in memory once they are there, or lets them be evicted again.

        Raises:
          BudgetExceeded: pinned contexts would take more than their share of memory (see `ContextOptions`).
        """
        self._contexts.pin(self.record.name, pinned)

    def delete(self) -> None:
        """Removes it from memory and storage.

        Raises:
          ContextGone: it was deleted before.
          ConfigError: it is answering.
        """
        self._contexts.delete(self.name)

    def __repr__(self) -> str:
        return f"Context(app={self.app!r}, name={self.name!r})"
