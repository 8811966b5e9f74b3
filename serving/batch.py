"""Decodes answers together: a dispatch gives each of them its next tokens, and reads weights once for all.

Each answer gets to the bit what it gets alone, whoever it is with: answers join and leave between dispatches.
Where weights are streamed or programs run, and without native kernels, answers are decoded one by one
(`serving.step`).
"""

import dataclasses
import time
from collections.abc import Sequence

from jaxllm.errors import JaxllmError
from serving.decoding import pace
from serving.host.forked import require_not_forked
from serving.options import BATCH_ROWS
from serving.run import Run
from serving.runners.runner import BatchRow
from serving.step import after_dispatch, decode_from, decoded, fail

# Answers of one dispatch, where `EngineOptions.batch_rows` has all of its buckets.
MAX_BATCH = BATCH_ROWS[-1]


def batchable(run: Run) -> bool:
    """Whether the next step of a run may be one with others' (see `decode_together`).

    Drafts are off while answers are decoded together; a drafter catches up when its answer is alone again. A
    sequence that is about to slide takes that step by itself, and so do guided answers, whose next token may
    depend on their last one in ways that the host alone knows.
    """
    plain = run.stage == "decode" and run.room_tokens > 0 and not run.request.config.guided
    return plain and run.runner.batch is not None


def decode_together(runs: Sequence[Run], most_tokens: int | None = None) -> None:
    """Decodes a block of each run, in one dispatch, or in several where no bucket has as many rows. Levels of
    a model share a dispatch, unless a level has adapters of its own: then each has one.

    A JaxllmError ends the runs that it concerns, of which each raises it to whoever iterates, and no other.
    Any other error ends all runs of the dispatch, and is raised.

    Args:
      runs: different ones, each `batchable`. Those that another thread closes meanwhile are left out.
      most_tokens: of each run; None for as many as take the time that a user should wait for the next words.
    """
    require_not_forked()
    families: dict[int, list[Run]] = {}
    for run in runs:
        assert run.runner.batch is not None, "a run is not batchable"
        families.setdefault(id(run.runner.batch.family), []).append(run)
    for each in families.values():
        try:
            _decode_family(each, most_tokens)
        except BaseException:
            for run in each:
                fail(run)
            raise
        finally:
            for run in each:
                run.stepped_s = time.perf_counter()


def _decode_family(runs: Sequence[Run], most_tokens: int | None) -> None:
    """`decode_together` of runs that share a dispatch."""
    before = [len(run.tokens) for run in runs]
    with runs[0].runner.lock:
        errors = _dispatch([run for run in runs if batchable(run)], most_tokens)
    for run, tokens in zip(runs, before, strict=True):
        try:
            if run in errors:
                raise errors[run]
            after_dispatch(run, tokens)
        except JaxllmError as error:
            run.closed_because = error
            fail(run)


def _dispatch(runs: Sequence[Run], most_tokens: int | None) -> dict[Run, JaxllmError]:
    """Decodes a block of each run, under the model's lock: the errors of those that must end."""
    errors: dict[Run, JaxllmError] = {}
    if not runs:
        return errors
    began, batch = time.perf_counter(), runs[0].runner.batch
    assert batch is not None
    # A run that has just joined does not know yet how long a token takes.
    block = max(run.pace for run in runs) if most_tokens is None else most_tokens
    begun: list[tuple[Run, list[int], BatchRow]] = []
    for run in runs:
        try:
            limit = run.runner.decode_limit(block, min(run.wanted_tokens, run.room_tokens))
            cached, row = decode_from(run, limit)
            own = run.runner.batch
            begun.append((run, cached, dataclasses.replace(row, units=None if own is None else own.units)))
        except JaxllmError as error:
            errors[run] = error
    try:
        found = batch.decode_batch([row for _, _, row in begun])
    except JaxllmError as error:
        return errors | {run: error for run, *_ in begun}
    steps = max((len(each.tokens) for each in found), default=1)
    took = pace(1000 * (time.perf_counter() - began) / steps)
    for (run, cached, _), each in zip(begun, found, strict=True):
        run.pace = took
        try:
            decoded(run, cached, each)
        except JaxllmError as error:
            errors[run] = error
    return errors
