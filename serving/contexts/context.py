"""The interface of contexts for callers.

context = service.new_context("mail")             newLLMCtx in the paper (LLMS, section 3.1)
for piece in context.generate("Dear ..."): ...    callLLM
context.delete()                                  delLLMCtx
"""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Sequence
from datetime import datetime

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import CheckpointError, ConfigError, ContextGone, JaxllmError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.contexts.layout import folder_name, written
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import Turn
from jaxllm.serving.contexts.record import Record, TurnTokens, turn_ids
from jaxllm.serving.contexts.saving import slid_record
from jaxllm.serving.engine.request import DEFAULT_MAX_TOKENS, GenerationConfig, Sliding, kept_tokens
from jaxllm.serving.engine.run import Lifecycle, Run
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings


class ContextCall(Lifecycle):
    """Restores a context before an answer, and stores it afterwards.

    If an error or an interrupt ends the answer, the tokens so far are stored and the error is raised; an
    error of storing them is raised by the context's next call.

    Attributes:
      record: record of the context before the answer.
      restoration: restoration of the context; the default before the first step.
      finish_ms: time to make room in memory for new chunks, and to compress and store them after the answer.
    """

    def __init__(self, contexts: Contexts, record: Record, base: Record, *, most_tokens: int) -> None:
        """See the class; `base` is `record`, or its rest after sliding, and `most_tokens` the maximum number
        of tokens of the context after the answer."""
        self.record, self._contexts, self._base, self._most_tokens = record, contexts, base, most_tokens
        self._turn: Turn | None = None

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        record, contexts, source = self.record, self._contexts, run.request.source
        if run.request.level != record.origin.level:
            self.record = self._base = record = contexts.record(record.app, record.name, run.request.level)
        base = None if self._base is record else self._base
        if source is not None:
            base = dataclasses.replace(base or record, source=source)
        if contexts.record(record.app, record.name).tokens != record.tokens:
            raise ConfigError(f"the context {record.name} went on since this answer was asked for; ask again")
        self._turn = contexts.begin(
            record,
            run.session,
            prompt_tokens=len(run.sequence),
            most_tokens=self._most_tokens,
            base=base,
            prompt=run.sequence,
            rows=run.request.rows,
        )
        self._turn.run = weakref.ref(run)
        self.restoration = self._turn.restoration

    def stepped(self, run: Run) -> None:
        """See `Lifecycle`."""
        if self._turn is None:
            return
        began = time.perf_counter()
        self._contexts.grow(self._turn, len(run.sequence))
        self.finish_ms += 1000 * (time.perf_counter() - began)

    def sliding(self, run: Run) -> None:
        """See `Lifecycle`."""
        self._contexts.leaving(run.session, run.reused_tokens)

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        turn = self._turn
        if turn is None:
            return
        # First: a later interrupt finds the turn ended.
        turn.over = True
        self._turn = None
        if not run.tokens:
            self._contexts.abandon(turn)
            return
        began = time.perf_counter()
        self._contexts.finish(turn, run.sequence, run.reused_tokens)
        self.finish_ms += 1000 * (time.perf_counter() - began)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`."""
        try:
            self.finish(run)
        except JaxllmError as error:
            name = self.record.name
            what = f"the last answer in the context {name} could not be kept when it was dropped"
            self._contexts.note_error(name, what, error)

    def dropped(self, run: Run) -> None:
        """See `Lifecycle`."""
        # In a forked child the turn belongs to the parent.
        if self._turn is not None and not self._contexts.forked:
            self.failed(run)


class Context:
    """A context of an app.

    Attributes:
      app: owner of the context.
      name: name, unique in the store, by which it is opened after a restart.
    """

    # Lifecycle of its answers.
    _call = ContextCall

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
        """The level that answers in it, in percent."""
        return self.record.origin.level

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the context; for an encoder-decoder those of its decoder."""
        return self.record.tokens

    @property
    def source(self) -> tuple[int, ...]:
        """The tokens of an encoder-decoder's source, from the first prompt. Empty before, and for other
        models."""
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
        rows: PromptEmbeddings | None = None,
    ) -> Answer:
        """Answers a prompt that follows the context's tokens (see `answer`).

        Args:
          prompt, instruction, slide, rows: see `answer`.
          max_tokens: maximum number of tokens of the answer.
          stop: strings that end the answer.
          ignore_eos: whether to continue past the model's end tokens.
          sampling: sampling parameters; greedy by default.
        """
        config = GenerationConfig(
            max_tokens=max_tokens, stop=tuple(stop), ignore_eos=ignore_eos, sampling=sampling or Sampling()
        )
        return self.answer(prompt, config, instruction=instruction, slide=slide, rows=rows)

    def answer(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig,
        *,
        instruction: str = "",
        slide: bool = False,
        rows: PromptEmbeddings | None = None,
    ) -> Answer:
        """Answers a prompt that follows the context's tokens.

        The first prompt of an encoder-decoder is the context's source; later ones are forced tokens of its
        decoder before it continues, and may be empty.

        Args:
          prompt: the user's text, or token ids, which are used unchanged.
          config: length, stops and sampling of the answer.
          instruction: text before everything; only in the first call.
          slide: whether to drop the middle of the context if context, prompt and answer exceed the model's
            window (see `jaxllm.serving.engine.request`). The stored context changes only after the answer.
          rows: embeddings in place of some of the prompt's ids, at positions relative to its first. They
            are stored with the context, which then can neither slide nor move to another model.

        Returns:
          The answer. Its first piece raises BudgetExceeded if the context would not fit into memory, its last
          if the context cannot be stored; the context is then as before the call.

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
            window, size = engine.options.context_tokens, engine.options.kv_chunk_tokens
            sliding, most = Sliding(sink_tokens=size), max(0, window - len(prompt))
            if len(record.tokens) > most:
                base = slid_record(record, chunk_tokens=size, most=min(most, kept_tokens(window)))
        asked = TurnTokens.after(base, base.tokens, prompt, engine.tokenizer, engine.cfg)
        rows = PromptEmbeddings.joined((0, contexts.rows_before(record)), (len(base.tokens), rows))
        request = engine.request(
            asked.prompt, config, level=record.origin.level, sliding=sliding, rows=rows, source=asked.source
        )
        call = self._call(contexts, record, base, most_tokens=len(request.prompt) + config.max_tokens)
        return Answer(engine.decoding(request), engine.tokenizer, request, lifecycle=call)

    def pin(self, pinned: bool = True) -> None:
        """Pins its chunks in memory once they are there, or unpins them.

        Raises:
          BudgetExceeded: pinned contexts would exceed their share of memory (see `ContextOptions`).
        """
        self._contexts.pin(self.record.name, pinned)

    def delete(self) -> None:
        """Deletes it from memory and storage.

        Raises:
          ContextGone: it was deleted before.
          ConfigError: it is answering.
        """
        self._contexts.delete(self.name)

    def __repr__(self) -> str:
        return f"Context(app={self.app!r}, name={self.name!r})"


def fork(contexts: Contexts, record: Record, tokens: int) -> Record:
    """Makes a context of the same app and level with a context's first `tokens` tokens, and returns its
    record. Their whole chunks are shared on storage (see `ContextStore.link`) or copied, their rows copied.
    Unreadable chunks are recomputed. `record` is of the engine's origin (see `Contexts.record`).

    Raises:
      BudgetExceeded: the app has reached its number of contexts, or there is no space.
      CheckpointError: it cannot be written.
    """
    count = min(tokens // record.origin.chunk_tokens, len(record.bits))
    if record.state_tokens:
        # States cover all of their tokens, or none.
        count = len(record.bits) if tokens >= record.state_tokens else 0
    made, store = contexts.create(record.app, level=record.origin.level), contexts.store
    try:
        first = dataclasses.replace(
            made,
            tokens=record.tokens[:tokens],
            source=record.source if tokens else (),
            mass=record.mass[:count],
            seen=record.seen[:count],
            state_tokens=record.state_tokens if count else 0,
        )
        store.wait(record.name)
        wanted, chunks = dict(enumerate(record.bits[:count])), {}
        linked = store.link(first, record.name, wanted) if contexts.options.share_beginnings else {}
        cached = record.state_tokens or count * record.origin.chunk_tokens
        # Damaged, or deleted or changed since the record was read: the tokens suffice.
        with contextlib.suppress(CheckpointError, ContextGone):
            stored = store.record(record.name)
            if stored.tokens[:cached] == record.tokens[:cached]:
                there = {chunk for chunk, bits in enumerate(stored.bits[:count]) if bits != LOST}
                chunks = store.read_chunks(record.name, there - linked.keys())
        widths = {n: wanted[n] for n in linked} | {n: bits for n, (bits, _) in chunks.items()}
        first = dataclasses.replace(first, bits=tuple(widths.get(n, LOST) for n in range(count)))
        return store.commit(first, chunks, linked=linked, rows=contexts.rows_before(record, tokens))
    except BaseException:
        with contextlib.suppress(JaxllmError):
            contexts.delete(made.name)
        raise


def erase(contexts: Contexts, app: str) -> None:
    """Deletes an app's contexts, and erases the key of encrypted ones: nobody can read copies of their files,
    including backups.

    Raises:
      ConfigError: contexts are not encrypted, the app's name is invalid, or a context is answering.
      CheckpointError: the device failed; the key is erased nevertheless, if possible.
    """
    vault = contexts.store.vault
    if vault is None:
        raise ConfigError("contexts are not encrypted; delete them one by one, or open with encryption")
    folder = folder_name(app)
    try:
        for record in contexts.store.records(app):
            contexts.delete(record.name)
    finally:
        with written(vault.folder):
            vault.erase(folder)
