"""Moves requests from stage to stage, one dispatch a step; this module alone has the order of the stages.

  plan      chooses level and kept tokens, before the first step (`serving.planning.planner`)
  begin     restores the request's context into its session (`serving.contexts`)
  prefill   computes the prompt's tokens that the session lacks, chunk by chunk
  decode    further tokens: plain, or a tree of drafts and its verification (`serving.speculation`)
  finish    stores the context (`serving.contexts`)

Steps of other requests may come between any two steps of one.
"""

import collections
import time
from typing import Any

import numpy as np

from jaxllm.errors import ContextGone, NotFinite
from jaxllm.sampling import NO_TOKEN
from serving.decoding import pace
from serving.request import common_prefix
from serving.run import Run
from serving.runners.runner import PrefillChunk
from serving.sliding import Sliding, kept_tokens, slid


def step(*running: Run) -> Run:
    """Runs one dispatch of the run that has waited longest.

    Args:
      running: runs whose stage is not "ended".

    Returns:
      The run that was stepped.
    """
    run = min(running, key=lambda each: each.stepped_s)
    with run.runner.lock:
        try:
            match run.stage:
                case "begin":
                    _begin(run)
                case "prefill":
                    _prefill(run)
                case "decode":
                    _decode(run)
                case "finish":
                    _finish(run)
        except BaseException:
            run.fail()
            raise
        finally:
            run.stepped_s = time.perf_counter()
    return run


def _begin(run: Run) -> None:
    """Restores the context, and cuts the missing tokens of the prompt into chunks."""
    run.lifecycle.begin(run)
    run.began_s = time.perf_counter()
    session, runner, prompt = run.session, run.runner, run.sequence
    cached, cache = session.take()
    if session.weights_version != runner.weights_version:
        # Keys and values of other weights are invalid, and another level's have other shapes.
        cached, cache, session.weights_version = [], None, runner.weights_version
    # The last token is always fed, for its logits.
    run.reused_tokens = min(common_prefix(cached, prompt), len(prompt) - 1)
    room = run.decoding.cache_tokens(len(prompt))
    cache = runner.start(room) if cache is None else cache
    session.cache = runner.make_room(cache, room)
    session.tokens = prompt[: run.reused_tokens]
    run.chunks = collections.deque(runner.prefill_chunks(len(prompt) - run.reused_tokens))
    run.prefill_mode = run.chunks[0].mode
    run.stage = "prefill"
    _prefill(run)


def _prefill(run: Run) -> None:
    """Feeds the next chunk; after the last one, samples the first token."""
    chunk = run.chunks.popleft()
    logits = _feed(run, chunk, len(run.sequence))
    if run.chunks:
        return
    token, run.sampler = run.runner.sample(logits, run.sampler)
    # The transfer waits for the device: only now could a user see the token.
    first = _finite(run, [int(np.asarray(token)[0])])
    run.timings.ttft_ms = run.elapsed_ms
    run.stage = "decode"
    _take(run, first)


def _decode(run: Run) -> None:
    """Runs one dispatch of further tokens: plain, or a draft and its verification."""
    _require_same_weights(run)
    if run.room_tokens <= 0 and run.request.sliding is not None:
        _slide(run, run.request.sliding)
    began = time.perf_counter()
    session, decoding = run.session, run.decoding
    limit = decoding.limit(run.pace, min(run.wanted_tokens, run.room_tokens))
    pending = run.tokens[-1]
    cached, cache = session.take()
    cache = run.runner.make_room(cache, decoding.cache_tokens(len(cached) + limit))
    rows, count, cache, run.sampler = decoding.decode(
        run.last_token, cache, run.sampler, run.stop_ids, limit, cached
    )
    block = np.asarray(rows)[0, : int(count)].tolist()
    session.cache, session.tokens = cache, [*cached, pending, *block[:-1]]
    _finite(run, block)
    run.pace = pace(1000 * (time.perf_counter() - began) / len(block))
    _take(run, block)


def _take(run: Run, block: list[int]) -> None:
    """Adds tokens to the run, and checks whether it has ended."""
    # Streamed weights may have failed while the block was computed.
    run.runner.require_usable()
    run.take(block)
    run.lifecycle.stepped(run)
    full = run.room_tokens <= 0 and run.request.sliding is None
    if run.finish_reason is None and (run.wanted_tokens <= 0 or full):
        run.finish_reason = "length"
    if run.finish_reason is not None:
        run.flush()
        run.stage = "finish"


def _finish(run: Run) -> None:
    """Ends the run: its lifecycle stores the context."""
    run.stage = "ended"
    run.lifecycle.finish(run)


def _feed(run: Run, chunk: PrefillChunk, end: int) -> Any:
    """Feeds the next chunk of the sequence's first `end` tokens; returns the logits after it."""
    _require_same_weights(run)
    session, at = run.session, len(run.session.tokens)
    cached, cache = session.take()
    tokens = run.sequence[at : min(at + chunk.tokens, end)]
    logits, session.cache = run.runner.prefill(cache, tokens, at, chunk)
    session.tokens = cached + tokens
    return logits


def _slide(run: Run, sliding: Sliding) -> None:
    """Drops the middle of the sequence, and feeds its newest tokens at their new positions."""
    session, runner, sinks = run.session, run.runner, sliding.sink_tokens
    run.lifecycle.sliding(run)
    kept = slid(run.sequence, sink_tokens=sinks, most=kept_tokens(runner.options.context_tokens))
    run.sequence, session.tokens = kept, kept[:sinks]
    # The last token is not in the cache: decoding feeds it.
    for chunk in runner.prefill_chunks(len(kept) - 1 - sinks):
        _feed(run, chunk, len(kept) - 1)


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
