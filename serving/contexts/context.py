"""An app's context, and the answers in it.

context = service.new_context("mail")             newLLMCtx in the paper (LLMS, section 3.1)
for piece in context.generate("Dear ..."): ...    callLLM
context.delete()                                  delLLMCtx
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Literal

from jaxllm.errors import ConfigError, JaxllmError, TemplateError
from jaxllm.sampling import Sampling
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.prompts import prompt_ids
from jaxllm.tokenizer import Tokenizer
from serving.contexts.growth import slid_record
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.restore import Restoration
from serving.contexts.turn import Turn
from serving.generation import DEFAULT_MAX_TOKENS, Generation, GenerationConfig, Session
from serving.sliding import Sliding, kept_tokens

# Stands for a turn's text while a template is looked at; no text has it.
_PLACE = "\ue000\ue001\ue000"


class ContextAnswer(Iterator[str]):
    """An answer as it comes: iterate for pieces of text, then read the rest.

    When it has ended, was closed or dropped, what was said is part of the context and stored. So it is where
    an error or an interrupt ends it, as far as it had come: that comes out, and what storing may raise beside
    it comes out of the context's next call.

    Attributes:
      generation: the answer's text, tokens and timings.
      restoration: how the context came back; before the first piece was asked for, nothing.
      finish_ms: what it took to make room in memory for what was said, and to compress and store it when the
        answer had ended.
    """

    # What `__del__` looks at, however far `__init__` came.
    _turn: Turn | None = None

    def __init__(
        self, contexts: Contexts, name: str, generation: Generation, begin: Callable[[], Turn]
    ) -> None:
        self.generation, self.restoration, self.finish_ms = generation, Restoration(), 0.0
        self._contexts, self._name, self._begin = contexts, name, begin
        self._state: Literal["new", "running", "ended", "stopped"] = "new"

    def __next__(self) -> str:
        try:
            return self._piece()
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self._try_to_end()
            raise

    def result(self) -> "ContextAnswer":
        """Runs to the end and returns itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stops; what was said so far stays in the context."""
        self.generation.close()
        self._end()

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.generation.text

    def __del__(self) -> None:
        # Dropped in the middle: other contexts must be able to go on. A forked child's copy is its parent's.
        if self._turn is not None and not self._contexts.forked:
            try:
                self.generation.close()
            finally:
                self._try_to_end()

    def _piece(self) -> str:
        if self._state == "stopped":
            raise ConfigError(
                f"the answer in the context {self._name} was ended by its service; what it had said is kept"
            )
        if self._state == "new":
            self._turn = self._begin()
            self._state = "running"
            self._turn.stop = weakref.WeakMethod(self._stop)
            self.restoration = self._turn.restoration
        # An answer that has ended has no more pieces.
        piece = next(self.generation)
        assert self._turn is not None
        began = time.perf_counter()
        self._contexts.grow(self._turn, len(self.generation.sequence))
        self.finish_ms += 1000 * (time.perf_counter() - began)
        return piece

    def _stop(self) -> None:
        try:
            self.close()
        finally:
            self._state = "stopped"

    def _end(self) -> None:
        turn = self._turn
        if turn is not None:
            # First: an interrupt behind it keeps nobody waiting.
            turn.over = True
        self._turn = None
        if self._state != "stopped":
            self._state = "ended"
        if turn is None:
            return
        if not self.generation.tokens:
            self._contexts.abandon(turn)
            return
        began = time.perf_counter()
        self._contexts.finish(turn, self.generation.sequence, self.generation.reused_tokens)
        self.finish_ms += 1000 * (time.perf_counter() - began)

    def _try_to_end(self) -> None:
        """`_end` where something else is to come out than what it may raise."""
        try:
            self._end()
        except JaxllmError as error:
            self._contexts.unheard.note(self._name, error)


class Context:
    """A context of an app.

    Attributes:
      app: whose it is.
      name: unique in the store; by it the context is found again after a restart.
    """

    def __init__(self, contexts: Contexts, record: Record) -> None:
        self._contexts, self.app, self.name = contexts, record.app, record.name

    @property
    def record(self) -> Record:
        """What is stored of it.

        Raises:
          ContextGone: it was deleted, or is of another model, level, codec or adapter.
        """
        return self._contexts.record(self.app, self.name)

    @property
    def level(self) -> int:
        """The sub-model that answers in it, in percent."""
        return self.record.origin.level

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that was said in it."""
        return self.record.tokens

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
    ) -> ContextAnswer:
        """Answers in this context: what was said before comes first.

        Args:
          prompt: what the user says; or token ids, which are taken as they are.
          instruction: what to do, said before all; only in the first call.
          max_tokens: most tokens of the answer.
          stop: strings that end it.
          ignore_eos: go on past the model's end tokens.
          slide: where all of it together outgrows the model's window, forget the middle of what was said
            before, and again whenever the answer outgrows it (see `serving.sliding`). What is stored is as it
            was until the answer has ended.
          sampling: how tokens are chosen; greedy by default.

        Raises:
          ContextGone: see `record`.
          ConfigError: the prompt is empty or malformed, or an instruction comes late.
          ContextOverflow: what was said before and the prompt are longer than the model's window.

        The first piece raises BudgetExceeded where the context would not fit into memory, the last where it
        cannot be stored; it is then as it was before the call.
        """
        contexts, app, name = self._contexts, self.app, self.name
        engine, record = contexts.engine, self.record
        contexts.unheard.tell(name)
        now = datetime.now()
        if isinstance(prompt, str):
            tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
            prompt = turn_ids(tokenizer, record.tokens, prompt, instruction, now=now)
        elif instruction:
            raise ConfigError("an instruction comes with a prompt of text, not with token ids")
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one token of text")
        session, base, sliding = Session(), record, None
        if slide:
            base = self._slid(record, len(prompt))
            sliding = Sliding(
                sink_tokens=engine.options.kv_chunk_tokens,
                leaving=lambda: contexts.leaving(session, generation.reused_tokens),
            )
        whole = [*base.tokens, *prompt]
        config = GenerationConfig(
            max_tokens=max_tokens, stop=tuple(stop), ignore_eos=ignore_eos, sampling=sampling or Sampling()
        )
        generation = engine.stream(whole, config, level=record.origin.level, session=session, sliding=sliding)

        def begin() -> Turn:
            if contexts.record(app, name).tokens != record.tokens:
                raise ConfigError(f"the context {name} went on since this answer was asked for; ask again")
            return contexts.begin(
                app,
                name,
                session,
                prompt_tokens=len(whole),
                most_tokens=len(whole) + max_tokens,
                base=None if base is record else base,
            )

        return ContextAnswer(contexts, name, generation, begin)

    def _slid(self, record: Record, prompt_tokens: int) -> Record:
        """What is left of the context where it and a prompt outgrow the window."""
        options = self._contexts.engine.options
        room = max(0, options.context_tokens - prompt_tokens)
        if len(record.tokens) <= room:
            return record
        most = min(room, kept_tokens(options.context_tokens))
        return slid_record(record, chunk_tokens=options.kv_chunk_tokens, most=most)

    def pin(self, pinned: bool = True) -> None:
        """Keeps its chunks in memory once they are there, or lets them leave for others'.

        Raises:
          BudgetExceeded: pinned contexts would take more than their share of memory (see `ContextOptions`).
        """
        self._contexts.pin(self.record.name, pinned)

    def delete(self) -> None:
        """Forgets it, in memory and on storage.

        Raises:
          ContextGone: it was deleted before.
          ConfigError: it is answering.
        """
        self._contexts.delete(self.name)

    def __repr__(self) -> str:
        return f"Context(app={self.app!r}, name={self.name!r})"


def turn_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    prompt: str,
    instruction: str = "",
    *,
    now: datetime | None = None,
) -> list[int]:
    """The tokens that a user's turn adds to a context.

    Args:
      tokenizer: the model's; where it has a chat template, that writes what stands between turns.
      before: the context's tokens, which end with an answer; none before the first turn.
      prompt: what the user says.
      instruction: said before all.
      now: told to templates that ask for the time.

    Raises:
      ConfigError: the prompt is empty, or an instruction comes late.
      TemplateError: the template is broken, or does not keep an answer as it was.
    """
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give it at least one word")
    chat = tokenizer.has_chat_template
    if not before:
        form = "chat" if chat or instruction else "text"
        return prompt_ids(
            tokenizer, TaskExample(user=prompt, answer="", system=instruction, form=form), now=now
        )
    if instruction:
        raise ConfigError("an instruction comes with the first prompt of a context; make a new context")
    if not chat:
        return tokenizer.encode(prompt, add_special_tokens=False)
    turns = [("user", _PLACE), ("assistant", _PLACE), ("user", prompt)]
    text = tokenizer.chat_text([{"role": role, "content": each} for role, each in turns], now=now)
    answer = text.text.find(_PLACE, text.text.find(_PLACE) + len(_PLACE))
    if text.text.count(_PLACE) < 2:
        raise TemplateError("the model's chat template does not repeat answers: give prompts as token ids")
    ids = tokenizer.encode(text.part(answer + len(_PLACE)), add_special_tokens=False)
    # The token that ended the answer is what the template closes a turn with.
    return ids[1:] if ids[:1] == [before[-1]] and before[-1] in tokenizer.eos_ids else ids
