"""Moves requests from stage to stage; this module alone has the order of the stages.

  begin     the request's context is restored into its session, perhaps with the prompt's first chunk
            (`serving.contexts`)
  prefill   the prompt's tokens that the session lacks are fed, chunk by chunk
  decode    further tokens: a block, or a tree of drafts and its verification (`serving.speculation`)
  finish    the context is stored (`serving.contexts`)

Steps of other requests may come between any two of a request. Who has an objective plans before
(`serving.planning.planner`).
"""

import collections
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.errors import ContextGone, JaxllmError, NotFinite
from jaxllm.sampling_state import NO_TOKEN
from serving.decoding import pace
from serving.host.forked import require_not_forked
from serving.request import Fed
from serving.run import Dispatched, Run
from serving.runners.runner import BatchRow, DecodedRow
from serving.sliding import Sliding, kept_tokens, slid

if TYPE_CHECKING:
    from jaxllm.kv.cache import KVCache


def step(*running: Run) -> Run:
    """Takes one step of the run that has waited longest: restores its context and feeds the first chunk,
    feeds a chunk, decodes a block or verifies a tree, or stores its context.

    Args:
      running: runs whose stage is not "ended".

    Returns:
      The run that took the step.
    """
    run = min(running, key=lambda each: each.stepped_s)
    try:
        match run.stage:
            case "begin":
                run.lifecycle.begin(run)
                _dispatch(run, _begin)
            case "prefill":
                _dispatch(run, _prefill)
            case "decode":
                _dispatch(run, _decode)
            case "finish":
                _finish(run)
    except BaseException:
        fail(run)
        raise
    finally:
        run.stepped_s = time.perf_counter()
    return run


def close(run: Run, because: JaxllmError | None = None) -> None:
    """Ends a run between two dispatches; the tokens so far stay in its session.

    Args:
      run: to end.
      because: raised to whoever iterates further; None to end the iteration.
    """
    require_not_forked()
    with run.runner.lock:
        run.pieces.clear()
        run.closed_because = because or run.closed_because
        _end(run)
    run.lifecycle.finish(run)


def fail(run: Run) -> None:
    """Ends a run after an error or an interrupt, which may come again in here."""
    _end(run)
    run.lifecycle.failed(run)


def _dispatch(run: Run, work: Callable[[Run], None]) -> None:
    """Does the work of a stage under the model's lock."""
    tokens = len(run.tokens)
    with run.runner.lock:
        if run.stage != "ended":
            work(run)
    after_dispatch(run, tokens)


def after_dispatch(run: Run, tokens: int) -> None:
    """Calls the run's lifecycle, without the model's lock, after a dispatch before which the answer had
    `tokens` tokens."""
    if run.stage == "ended":
        # Another thread closed the run, perhaps before its context was restored.
        run.lifecycle.finish(run)
    elif len(run.tokens) > tokens:
        run.lifecycle.stepped(run)


def _begin(run: Run) -> None:
    """Cuts the tokens that the session lacks into chunks, and feeds the first, unless that was done while the
    session was restored."""
    run.began_s = time.perf_counter()
    session, runner, prompt = run.session, run.runner, run.sequence
    cached, cache = session.take()
    fed, session.fed = session.fed, None
    if session.weights_version != runner.weights_version:
        # Keys and values of other weights are of no use, and those of another level have other shapes.
        cached, cache, fed, session.weights_version = [], None, None, runner.weights_version
    if fed is not None and cache is not None:
        _go_on(run, fed, cached, cache)
        return
    source = run.request.source
    reads = source is not None and (cache is None or session.source != source)
    if reads:
        # What a decoder computed after one source is of no use after another.
        cached = []
    # The last token is always fed: the answer begins with its logits.
    run.reused_tokens = session.reusable(prompt[:-1], cached)
    room = run.decoding.cache_tokens(len(prompt))
    cache = runner.start(room) if cache is None else cache
    cache = runner.make_room(cache, room)
    session.cache = runner.read_source(cache, source) if source is not None and reads else cache
    session.source = source
    session.tokens = prompt[: run.reused_tokens]
    missing = len(prompt) - run.reused_tokens
    # Rows in place of tokens are prefilled in floats.
    by_rows = run.request.rows is not None
    run.chunks = collections.deque(
        runner.chunks_in("float", missing) if by_rows else runner.prefill_chunks(missing)
    )
    run.prefill_mode = run.chunks[0].mode
    run.stage = "prefill"
    _prefill(run)


def _go_on(run: Run, fed: Fed, cached: list[int], cache: "KVCache") -> None:
    """Begins a run whose first chunk is in the cache."""
    room = run.decoding.cache_tokens(len(run.sequence))
    run.session.cache, run.session.tokens = run.runner.make_room(cache, room), cached
    run.reused_tokens, run.chunks = fed.first, collections.deque(fed.rest)
    run.prefill_mode, run.dispatched = fed.chunk.mode, Dispatched("prefill", fed.chunk)
    run.stage = "prefill"
    if not fed.rest:
        _draw_first(run, fed.logits)


def _prefill(run: Run) -> None:
    """Feeds the next chunk; after the last one, draws the first token."""
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
        logits, session.cache = run.runner.prefill_rows(cache, tokens, at, chunk, run.request.rows)
    session.tokens, run.dispatched = cached + tokens, Dispatched("prefill", chunk)
    _count_states(run)
    if run.chunks:
        return
    if run.slid is not None:
        run.sequence, run.slid, run.stage = run.slid, None, "decode"
        return
    _draw_first(run, logits)


def _draw_first(run: Run, logits: Any) -> None:
    """Draws the first token, from the logits after the prompt."""
    token, run.sampler = run.decoding.first(logits, run.sampler)
    # The transfer waits for the device: only now could a user see the token.
    first = _finite(run, [int(np.asarray(token)[0])])
    run.timings.ttft_ms = run.elapsed_ms
    run.stage = "decode"
    _take(run, first)


def _decode(run: Run) -> None:
    """Decodes a block, or drafts and verifies; makes room first where the window is full."""
    if run.room_tokens <= 0 and run.request.sliding is not None:
        _require_same_weights(run)
        _slide(run, run.request.sliding)
        return
    began = time.perf_counter()
    limit = run.decoding.limit(run.pace, min(run.wanted_tokens, run.room_tokens))
    cached, row = decode_from(run, limit)
    rows, count, cache, sampler = run.decoding.decode(
        row.token, row.cache, row.sampler, row.stop_ids, limit, cached
    )
    block = np.asarray(rows)[0, : int(count)].tolist()
    run.pace = pace(1000 * (time.perf_counter() - began) / len(block))
    decoded(run, cached, DecodedRow(block, cache, sampler, run.decoding.accepted))


def decode_from(run: Run, limit: int) -> tuple[list[int], BatchRow]:
    """What the next block of a run is decoded from, of at most `limit` tokens: the tokens in its cache, and
    the arguments of the dispatch. Its session has no cache until `decoded`.

    Raises:
      ContextGone: the cache was computed by other weights.
    """
    _require_same_weights(run)
    cached, cache = run.session.take()
    cache = run.runner.make_room(cache, run.decoding.cache_tokens(len(cached) + limit))
    return cached, BatchRow(
        token=run.last_token, cache=cache, sampler=run.sampler, stop_ids=run.stop_ids, limit=limit
    )


def decoded(run: Run, cached: list[int], found: DecodedRow) -> None:
    """Adds a block to a run, and checks whether it has ended.

    Raises:
      NotFinite: the block has `NO_TOKEN`.
      JaxllmError: see `Runner.require_usable`.
    """
    session, run.sampler = run.session, found.sampler
    session.cache, session.tokens = found.cache, [*cached, run.tokens[-1], *found.tokens[:-1]]
    _count_states(run)
    run.dispatched, before = Dispatched("decode" if found.accepted is None else "verify"), len(run.tokens)
    _take(run, _finite(run, found.tokens))
    # The answer may stop in the middle of a block.
    run.drafted_tokens += min(found.accepted or 0, len(run.tokens) - before)


def _take(run: Run, block: list[int]) -> None:
    """Adds tokens to the run, and checks whether it has ended."""
    # Streamed weights may have failed while the block was computed.
    run.runner.require_usable()
    run.take(block)
    if run.finish_reason is None and run.decoding.complete:
        run.finish_reason = "stop"
    full = run.room_tokens <= 0 and run.request.sliding is None
    if run.finish_reason is None and (run.wanted_tokens <= 0 or full):
        run.finish_reason = "length"
    if run.finish_reason is not None:
        run.flush()
        run.stage = "finish"


def _finish(run: Run) -> None:
    """Ends the run; its lifecycle stores the context."""
    _end(run)
    run.dispatched = Dispatched("finish")
    run.lifecycle.finish(run)


def _end(run: Run) -> None:
    run.stage = "ended"
    if run.slid is not None:
        # The cache has a part of what the sequence was about to be.
        run.slid = None
        run.session.take()


def _slide(run: Run, sliding: Sliding) -> None:
    """Drops the middle of the sequence, and begins to feed its newest tokens at their new positions."""
    session, runner, sinks = run.session, run.runner, sliding.sink_tokens
    run.lifecycle.sliding(run)
    run.slid = slid(run.sequence, sink_tokens=sinks, most=kept_tokens(runner.options.context_tokens))
    # States cannot go back to the end of the sinks: they begin anew.
    kept = sinks if runner.cfg.states is None else 0
    session.tokens = run.slid[:kept]
    run.chunks = collections.deque(runner.prefill_chunks(len(run.slid) - 1 - kept))
    run.stage = "prefill"
    _prefill(run)


def _count_states(run: Run) -> None:
    """Notes how many tokens the states in the session's cache have gone through, before any are dropped."""
    run.session.state_tokens = None if run.runner.cfg.states is None else len(run.session.tokens)


def _require_same_weights(run: Run) -> None:
    if run.session.weights_version != run.runner.weights_version:
        raise ContextGone("the model's adapter was changed in the middle of an answer; ask again")


def _finite(run: Run, block: list[int]) -> list[int]:
    """Checks that a block has no `NO_TOKEN`, and returns it.

    Raises:
      NotFinite: it has one.
    """
    if NO_TOKEN in block:
        # Keys and values may not be finite, either: drop them.
        run.session.take()
        raise NotFinite(
            "the model's logits are not finite numbers, or every token is forbidden: check logit_bias; "
            "else the weights are damaged or overflow, so prepare the model again, or with wider weights"
        )
    return block
