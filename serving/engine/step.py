"""Moves requests from stage to stage; only this module knows the order of the stages.

  begin     the request's context is restored into its session, perhaps with the prompt's first chunk
            (`jaxllm.serving.contexts`)
  prefill   the prompt's tokens that the session lacks are fed, chunk by chunk
  decode    further tokens: a block, or a tree of drafts and its verification (`jaxllm.serving.speculation`)
  finish    the context is stored (`jaxllm.serving.contexts`)

Steps of other requests may come between any two of a request; where weights are resident, several requests
decode in one dispatch, which reads the weights once for all of them (`decode_together`). Requests with an
objective are planned first (`jaxllm.serving.elastic.planner`).
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from jaxllm.errors import ContextGone, JaxllmError, NotFinite
from jaxllm.sampling_state import NO_TOKEN
from jaxllm.serving.engine.decoding import pace
from jaxllm.serving.engine.request import Sliding, kept_tokens, slid
from jaxllm.serving.engine.run import Dispatched, Run
from jaxllm.serving.host.machine import require_not_forked
from jaxllm.serving.runners.runner import BatchRow, DecodedRow


def step(*running: Run) -> Run:
    """Runs one step of the run that has waited longest: restores its context and feeds the first chunk,
    feeds a chunk, decodes a block or verifies a tree, or stores its context.

    Args:
      running: runs whose stage is not "ended".

    Returns:
      The run that was stepped.
    """
    run = min(running, key=lambda each: each.stepped_s)
    try:
        if (matcher := run.decoding.matcher) is not None:
            # Wait before acquiring the model's lock, so that no other thread waits for it.
            matcher.wait()
            with run.runner.lock:
                if run.stage == "decode":
                    _check_end(run)
        match run.stage:
            case "begin":
                run.lifecycle.begin(run)
                _dispatch(run, _begin)
            case "prefill":
                _dispatch(run, _prefill)
            case "decode":
                _dispatch(run, _decode)
            case "finish":
                _end(run)
                run.dispatched = Dispatched("finish")
                run.lifecycle.finish(run)
    except BaseException:
        fail(run)
        raise
    finally:
        run.stepped_s = time.perf_counter()
    return run


def batchable(run: Run) -> bool:
    """Whether the next step of a run can be batched (see `decode_together`).

    Drafts are off in batched decoding; a drafter catches up when its answer is the only one again. Not
    batched are the step in which a sequence slides, and answers whose mask is not there or that need logits.
    """
    decodes = run.stage == "decode" and run.room_tokens > 0 and run.runner.batch is not None
    return decodes and run.decoding.batchable


def decode_together(runs: Sequence[Run], most_tokens: int | None = None) -> None:
    """Decodes a block of each run in one dispatch, or in several if no bucket has enough rows. Levels of
    a model share a dispatch, except levels with adapters, which have one each. Tokens are bitwise equal to
    those of unbatched decoding.

    A JaxllmError ends only the runs that it concerns; each raises it on further iteration. Any other error
    ends all runs of the dispatch and is raised.

    Args:
      runs: distinct runs, all `batchable`. Runs that another thread closes meanwhile are skipped.
      most_tokens: maximum number of tokens per run; None for as many as fit the time of a dispatch.
    """
    require_not_forked()
    families: dict[int, list[Run]] = {}
    for run in runs:
        assert run.runner.batch is not None, "a run is not batchable"
        families.setdefault(id(run.runner.batch.family), []).append(run)
    for each in families.values():
        before = [len(run.tokens) for run in each]
        try:
            with each[0].runner.lock:
                errors = _dispatch_batch([run for run in each if batchable(run)], most_tokens)
            for run, tokens in zip(each, before, strict=True):
                try:
                    if run in errors:
                        raise errors[run]
                    _after_dispatch(run, tokens)
                except JaxllmError as error:
                    run.closed_because = error
                    fail(run)
        except BaseException:
            for run in each:
                fail(run)
            raise
        finally:
            for run in each:
                run.stepped_s = time.perf_counter()


def close(run: Run, because: JaxllmError | None = None) -> None:
    """Ends a run between two dispatches; the tokens so far stay in its session.

    Args:
      run: the run to end.
      because: error to raise on further iteration; None to end the iteration.
    """
    require_not_forked()
    with run.runner.lock:
        run.pieces.clear()
        run.closed_because = because or run.closed_because
        _end(run)
    run.lifecycle.finish(run)


def fail(run: Run) -> None:
    """Ends a run after an error or interrupt; another interrupt may come during this call."""
    _end(run)
    run.lifecycle.failed(run)


class Answer(Run, Iterator[str]):
    """A streamed answer: iterate for pieces of text, then read its attributes (see `Run`).

    Each dispatch acquires the model's lock (`Runner.lock`), which is free between dispatches: answers of
    one or several threads take turns. Another thread may close an answer.
    """

    def __next__(self) -> str:
        require_not_forked()
        try:
            while True:
                with self.runner.lock:
                    if self.pieces:
                        piece = self.pieces.popleft()
                        self.text += piece
                        return piece
                    if self.closed_because is not None:
                        raise self.closed_because
                    if self.stage == "ended":
                        raise StopIteration
                step(self)
        except StopIteration:
            raise
        except BaseException:
            fail(self)
            raise

    def result(self) -> Self:
        """Runs to the end and returns itself."""
        if self.stage == "begin":
            self.uninterrupted = True
        for _ in self:
            pass
        return self

    def close(self, because: JaxllmError | None = None) -> None:
        """Ends the answer; the tokens so far stay in the session.

        Args:
          because: error to raise on further iteration; None to end the iteration.
        """
        close(self, because)

    def __del__(self) -> None:
        # Release what the answer locks, wherever it was dropped or interrupted.
        self.lifecycle.dropped(self)


def _dispatch(run: Run, work: Callable[[Run], None]) -> None:
    tokens = len(run.tokens)
    with run.runner.lock:
        if run.stage != "ended":
            work(run)
    _after_dispatch(run, tokens)


def _after_dispatch(run: Run, tokens: int) -> None:
    """Calls the run's lifecycle without the model's lock, after a dispatch; `tokens` is the answer's length
    before it."""
    if run.stage == "ended":
        # Another thread closed the run, perhaps before its context was restored.
        run.lifecycle.finish(run)
    elif len(run.tokens) > tokens:
        run.lifecycle.stepped(run)


def _begin(run: Run) -> None:
    """Splits the tokens that the session lacks into chunks and feeds the first, unless the restore has fed
    it."""
    run.began_s = time.perf_counter()
    session, runner, prompt = run.session, run.runner, run.sequence
    cached, cache = session.take()
    fed, session.fed = session.fed, None
    if session.weights_version != runner.weights_version:
        # A cache from other weights is stale, and one from another level has other shapes.
        cached, cache, fed, session.weights_version = [], None, None, runner.weights_version
    room = run.decoding.cache_tokens(len(prompt))
    if fed is not None and cache is not None:
        # The first chunk is already in the cache.
        session.cache, session.tokens = runner.make_room(cache, room), cached
        run.reused_tokens, run.chunks = fed.first, collections.deque(fed.rest)
        run.prefill_mode, run.dispatched = fed.chunk.mode, Dispatched("prefill", fed.chunk)
        run.stage = "prefill"
        if not fed.rest:
            _sample_first(run, fed.logits)
        return
    source = run.request.source
    reads = source is not None and (cache is None or session.source != source)
    if reads:
        # The decoder's cache depends on its source.
        cached = []
    # Always feed the last token: its logits give the answer's first token.
    run.reused_tokens = session.reusable(prompt[:-1], cached)
    cache = runner.start(room) if cache is None else cache
    cache = runner.make_room(cache, room)
    session.cache = runner.read_source(cache, source) if source is not None and reads else cache
    session.source = source
    session.tokens = prompt[: run.reused_tokens]
    missing = len(prompt) - run.reused_tokens
    # Prompt embeddings are prefilled in floats.
    by_rows = run.request.rows is not None
    run.chunks = collections.deque(
        runner.chunks_in("float", missing) if by_rows else runner.prefill_chunks(missing)
    )
    run.prefill_mode = run.chunks[0].mode
    run.stage = "prefill"
    _prefill(run)


def _prefill(run: Run) -> None:
    _require_same_weights(run)
    session, at = run.session, len(run.session.tokens)
    # The last token of a sequence that slides is decoded from, not fed.
    sequence = run.sequence if run.slid is None else run.slid[:-1]
    chunk = run.chunks.popleft()
    cached, cache = session.take()
    tokens = sequence[at : at + chunk.tokens]
    if run.request.rows is None:
        logits, session.cache = run.runner.prefill(cache, tokens, at, chunk)
    else:
        logits, session.cache = run.runner.prefill_embeddings(cache, tokens, at, chunk, run.request.rows)
    session.tokens, run.dispatched = cached + tokens, Dispatched("prefill", chunk)
    _count_states(run)
    if run.chunks:
        return
    if run.slid is not None:
        run.sequence, run.slid, run.stage = run.slid, None, "decode"
        return
    _sample_first(run, logits)


def _sample_first(run: Run, logits: Any) -> None:
    token, run.sampler = run.decoding.first(logits, run.sampler)
    # The transfer waits for the device: the token is visible only now.
    first = _finite(run, [int(np.asarray(token)[0])])
    run.timings.ttft_ms = run.elapsed_ms
    run.stage = "decode"
    _take(run, first)


def _decode(run: Run) -> None:
    """Decodes a block, or drafts and verifies; slides first where the window is full."""
    if run.room_tokens <= 0 and run.request.sliding is not None:
        _require_same_weights(run)
        _slide(run, run.request.sliding)
        return
    began = time.perf_counter()
    limit = run.decoding.limit(run.pace, run.block_tokens)
    cached, row = _decode_from(run, limit)
    found = run.decoding.decode(row, cached)
    run.pace = pace(1000 * (time.perf_counter() - began) / max(1, len(found.tokens)))
    _decoded(run, cached, found)


def _decode_from(run: Run, limit: int) -> tuple[list[int], BatchRow]:
    """Inputs of a run's next block of at most `limit` tokens: the tokens in its cache, and the arguments of
    the dispatch. The session has no cache until `_decoded`."""
    _require_same_weights(run)
    cached, cache = run.session.take()
    cache = run.runner.make_room(cache, run.decoding.cache_tokens(len(cached) + limit))
    return cached, BatchRow(
        token=run.last_token, cache=cache, sampler=run.sampler, stop_ids=run.stop_ids, limit=limit
    )


def _decoded(run: Run, cached: list[int], found: DecodedRow) -> None:
    """Adds a block to a run, and checks whether it has ended."""
    session, run.sampler = run.session, found.sampler
    session.cache, session.tokens = found.cache, [*cached, run.tokens[-1], *found.tokens[:-1]]
    _count_states(run)
    run.dispatched, before = Dispatched("decode" if found.accepted is None else "verify"), len(run.tokens)
    _take(run, _finite(run, found.tokens))
    # The answer may stop in the middle of a block.
    run.drafted_tokens += min(found.accepted or 0, len(run.tokens) - before)


def _take(run: Run, block: list[int]) -> None:
    """Adds tokens to the run, and checks whether it has ended; under a grammar, the next step checks."""
    # Streamed weights may have failed while the block was computed.
    run.runner.require_usable()
    run.take(block)
    if run.decoding.matcher is None or run.finish_reason is not None:
        _check_end(run)


def _check_end(run: Run) -> None:
    matcher = run.decoding.matcher
    if run.finish_reason is None and matcher is not None and matcher.complete:
        run.finish_reason = "length" if matcher.completed else "stop"
    full = run.room_tokens <= 0 and run.request.sliding is None
    if run.finish_reason is None and (run.wanted_tokens <= 0 or full):
        run.finish_reason = "length"
    if run.finish_reason is not None:
        run.flush()
        run.stage = "finish"


def _end(run: Run) -> None:
    run.stage = "ended"
    if run.slid is not None:
        # The cache has only a part of the new sequence.
        run.slid = None
        run.session.take()


def _slide(run: Run, sliding: Sliding) -> None:
    """Drops the middle of the sequence, and begins to feed its newest tokens at their new positions."""
    session, runner, sinks = run.session, run.runner, sliding.sink_tokens
    run.lifecycle.sliding(run)
    run.slid = slid(run.sequence, sink_tokens=sinks, most=kept_tokens(runner.options.context_tokens))
    # Recurrent states cannot be rolled back to the end of the sinks: recompute them from the start.
    kept = sinks if runner.cfg.states is None else 0
    session.tokens = run.slid[:kept]
    run.chunks = collections.deque(runner.prefill_chunks(len(run.slid) - 1 - kept))
    run.stage = "prefill"
    _prefill(run)


def _count_states(run: Run) -> None:
    """Records the tokens that the states of the session's cache have consumed, before any are dropped."""
    run.session.state_tokens = None if run.runner.cfg.states is None else len(run.session.tokens)


def _require_same_weights(run: Run) -> None:
    if run.session.weights_version != run.runner.weights_version:
        raise ContextGone("the model's adapter was changed in the middle of an answer; ask again")


def _finite(run: Run, block: list[int]) -> list[int]:
    """Returns a block, which must not have `NO_TOKEN`."""
    if NO_TOKEN in block:
        # Keys and values may not be finite, either: drop them.
        run.session.take()
        raise NotFinite(
            "the model's logits are not finite numbers, or every token is forbidden: check logit_bias; "
            "else the weights are damaged or overflow, so prepare the model again, or with wider weights"
        )
    return block


def _dispatch_batch(runs: Sequence[Run], most_tokens: int | None) -> dict[Run, JaxllmError]:
    """Decodes a block of each run under the model's lock; returns the errors of runs that must end."""
    errors: dict[Run, JaxllmError] = {}
    if not runs:
        return errors
    began, batch = time.perf_counter(), runs[0].runner.batch
    assert batch is not None
    # The time per token of a run that has just joined is unknown.
    block = max(run.pace for run in runs) if most_tokens is None else most_tokens
    begun: list[tuple[Run, list[int], BatchRow]] = []
    for run in runs:
        try:
            if not _goes_on(run):
                continue
            limit = run.decoding.batch_limit(block, run.block_tokens)
            cached, row = _decode_from(run, limit)
            joined, own = run.decoding.batch_row(row, cached), run.runner.batch
            if joined is None:
                _decoded(run, cached, run.decoding.decode(row, cached))
                continue
            begun.append((run, cached, dataclasses.replace(joined, units=None if own is None else own.units)))
        except JaxllmError as error:
            errors[run] = error
    # A token under its mask does not wait for a block of others: its row would be idle.
    guided = [row.limit for run, _, row in begun if run.decoding.matcher is not None]
    most = min(guided, default=block)
    try:
        rows = [dataclasses.replace(row, limit=min(row.limit, most)) for _, _, row in begun]
        if rows and not batch.sizes(rows):
            # Until a bucket of several rows is loaded.
            found = [run.runner.decode(row) for (run, *_), row in zip(begun, rows, strict=True)]
        else:
            found = batch.decode_batch(rows)
    except JaxllmError as error:
        return errors | {run: error for run, *_ in begun}
    steps = max((len(each.tokens) for each in found), default=1)
    took = pace(1000 * (time.perf_counter() - began) / steps)
    for (run, cached, _), each in zip(begun, found, strict=True):
        run.pace = took
        try:
            if (kept := run.decoding.kept(each)).tokens:
                _decoded(run, cached, kept)
            else:
                run.session.cache, run.session.tokens, run.sampler = kept.cache, cached, kept.sampler
        except JaxllmError as error:
            errors[run] = error
    return errors


def _goes_on(run: Run) -> bool:
    """Whether a run decodes further tokens. Waits for its mask."""
    if (matcher := run.decoding.matcher) is not None:
        matcher.wait()
        _check_end(run)
    return run.stage == "decode"
