"""The scheduler, by simulation: who goes first, who waits, and for how long."""

import dataclasses
import statistics

import pytest

from jaxllm.serving.server.scheduler import (
    Queue,
    SchedulerOptions,
    Work,
    decayed,
    expected_load,
    next_dispatch,
    queue_refusal,
    retry_after_s,
)

OPTIONS = SchedulerOptions()
CHUNK_MS, BLOCK_MS, BLOCK_TOKENS, TOKEN_MS = 100.0, 50.0, 5, 10.0


def call(number, app, *, at, prefill_ms, tokens=20, priority="foreground"):
    return {
        "id": number, "app": app, "at": at, "prefill": prefill_ms, "tokens": tokens, "priority": priority,
        "begun": False, "last": at, "ttft": None, "ended": None,
    }  # fmt: skip


def work_of(each, options):
    ttft, tpot = options.ttft_ms(each["priority"]), options.tpot_ms(each["priority"])
    decodes = each["begun"] and each["prefill"] <= 0
    stage = ("decode" if decodes else "prefill") if each["begun"] else "start"
    due = each["last"] + BLOCK_TOKENS * tpot if decodes else each["at"] + ttft
    return Work(
        id=each["id"], app=each["app"], priority=each["priority"], since_ms=each["last"], due_ms=due,
        left_ms=BLOCK_MS if decodes else each["prefill"], rest_ms=each["prefill"] + TOKEN_MS * each["tokens"],
        stage=stage, token_ms=TOKEN_MS, tpot_ms=tpot, batchable=decodes,
    )  # fmt: skip


def simulate(calls, options=OPTIONS, until_ms=120_000.0):
    """Runs calls to their end; their times to the first token and to the end are in them."""
    now, used = 0.0, {}
    while now < until_ms and any(each["ended"] is None for each in calls):
        there = {each["id"]: each for each in calls if each["at"] <= now and each["ended"] is None}
        queue = Queue(now_ms=now, work=[work_of(each, options) for each in there.values()], engine_ms=used)
        ids = [each.id for each in next_dispatch(queue, options)]
        if not ids:
            now = min(each["at"] for each in calls if each["at"] > now)
            continue
        took = BLOCK_MS
        for number in ids:
            each = there[number]
            each["begun"] = True
            if each["prefill"] > 0:
                took = min(CHUNK_MS, each["prefill"])
                each["prefill"] -= took
                if each["prefill"] <= 0:
                    each["ttft"] = now + took - each["at"]
            else:
                each["tokens"] -= BLOCK_TOKENS
                if each["tokens"] <= 0:
                    each["ended"] = now + took
            each["last"] = now + took
        now += took
        used = decayed(used, took, 10_000.0)
        for number in ids:
            used[there[number]["app"]] = used.get(there[number]["app"], 0.0) + took / len(ids)
    return calls


def test_a_foreground_app_is_quick_beside_a_busy_background_app():
    busy = [call(i, "batch", at=0, prefill_ms=1000, tokens=100, priority="background") for i in range(8)]
    asked = [call(100 + i, "mail", at=300 + 900 * i, prefill_ms=60, tokens=10) for i in range(10)]
    simulate([*busy, *asked])
    # One chunk of the other app may just have begun.
    assert max(each["ttft"] for each in asked) <= 60 + CHUNK_MS
    assert all(each["ended"] is not None for each in busy)


def test_nothing_starves():
    background = call(0, "notes", at=0, prefill_ms=200, tokens=10, priority="background")
    # More foreground work than the engine can do.
    flood = [call(1 + i, "chat", at=100 * i, prefill_ms=150, tokens=5) for i in range(400)]
    simulate([background, *flood], until_ms=50_000)
    assert background["ended"] is not None
    assert background["ttft"] < 4 * OPTIONS.patience_ms


def test_an_app_that_floods_does_not_keep_others_from_their_share():
    flood = [call(i, "greedy", at=0, prefill_ms=400, tokens=20) for i in range(30)]
    modest = [call(100 + i, "modest", at=500 + 1500 * i, prefill_ms=100, tokens=20) for i in range(6)]
    simulate([*flood, *modest])
    assert max(each["ttft"] for each in modest) < 2_500
    middle = statistics.median(each["ended"] for each in flood)
    assert middle > max(each["ended"] for each in modest[:2])


def test_a_long_prompt_leaves_streams_their_pace():
    stream = call(0, "chat", at=0, prefill_ms=50, tokens=200)
    long = call(1, "mail", at=200, prefill_ms=5_000)
    simulate([stream, long])
    assert stream["ended"] <= 50 + 200 * OPTIONS.foreground_tpot_ms
    assert long["ttft"] <= 5_000 + 200 / BLOCK_TOKENS * BLOCK_MS


def work(number, **more):
    return Work(**{"id": number, "app": "a", "since_ms": 0.0, "due_ms": 100.0} | more)


def decide(*each, now_ms=0.0, options=OPTIONS, **more):
    """The ids of the next dispatch."""
    return [each.id for each in next_dispatch(Queue(now_ms=now_ms, work=each, **more), options)]


def test_single_decisions():
    assert decide() == []
    assert decide(work(1, due_ms=200.0), work(2)) == [2]
    # The latest time to begin counts, not the deadline.
    assert decide(work(1, due_ms=200.0, left_ms=150.0), work(2)) == [1]
    assert decide(work(1, priority="background", due_ms=1.0), work(2)) == [2]
    # A complete answer ends at once, however early it is.
    ahead = work(1, stage="finish", due_ms=9e9)
    assert decide(ahead, work(2, stage="decode", batchable=True), work(3)) == [1]
    late = work(1, priority="background", due_ms=1.0)
    assert decide(late, work(2), now_ms=OPTIONS.patience_ms + 1) == [1]
    # Among equals the app yields that has had more.
    others = (work(1), work(2, app="b"))
    assert decide(*others, engine_ms={"a": 500.0}) == [2]
    assert decide(*others, engine_ms={"b": 500.0}) == [1]


def test_runs_decode_together():
    rows = [work(i, stage="decode", batchable=True, due_ms=100.0 - i) for i in range(10)]
    alone = work(20, stage="decode", due_ms=500.0)
    assert decide(*rows, alone) == [9, 8, 7, 6, 5, 4, 3, 2]
    assert decide(alone, dataclasses.replace(rows[0], due_ms=900.0)) == [20]
    # Runs of one adapter.
    rows = [
        work(number, due_ms=due, stage="decode", token_ms=10.0, tpot_ms=200.0, batchable=True, adapter=name)
        for number, name, due in (
            (1, "", 30.0), (2, "formal", 10.0), (3, "", 20.0), (4, "formal", 40.0), (5, "x", 50.0)
        )
    ]  # fmt: skip
    assert decide(*rows) == [2, 4]
    assert decide(*(each for each in rows if each.adapter != "formal")) == [3, 1]
    # Batches of different adapters take their times one after the other.
    prefill = dataclasses.replace(rows[0], id=9, stage="prefill", left_ms=100.0)
    plain = [dataclasses.replace(each, adapter="") for each in rows]
    together, apart = (
        expected_load(Queue(now_ms=0.0, work=[prefill, *streams]), OPTIONS, "background").waiting_ms
        for streams in (plain, rows)
    )
    assert apart > together > 100.0


def test_slots_and_contexts_bound_what_begins():
    few = SchedulerOptions(running=2, background_running=1, reserved_running=0)
    run = work(1, stage="prefill", priority="background", due_ms=900.0)
    assert decide(run, work(2, priority="background", due_ms=1.0), options=few) == [1]
    assert decide(run, work(2), options=few) == [2]
    assert decide(run, work(3, stage="prefill", due_ms=500.0), work(2), options=few) == [3]
    kept = SchedulerOptions(running=2, reserved_running=1)
    assert decide(run, work(2), options=kept) == [1]
    assert decide(run, work(2, app="b"), options=kept) == [2]
    # Contexts begin where their chunks fit.
    turn = work(1, stage="decode", context_bytes=60, due_ms=900.0)
    small, large = work(2, context_bytes=30), work(3, context_bytes=50)
    assert decide(turn, small, context_bytes=100) == [2]
    assert decide(turn, large, context_bytes=100) == [1]
    # One that takes all that there is, and more, runs alone.
    assert decide(work(3, context_bytes=500), context_bytes=100) == [3]
    # A large one that waits is not overtaken for ever, but by a foreground call.
    assert decide(turn, large, work(4, context_bytes=30), context_bytes=100) == [1]
    late = dataclasses.replace(large, priority="background")
    assert decide(turn, late, work(4, context_bytes=30), context_bytes=100) == [4]
    # What is in no context begins.
    assert decide(turn, large, work(4), context_bytes=100) == [4]


def test_the_load_that_a_new_call_finds():
    def load(*each, priority="foreground"):
        return expected_load(Queue(now_ms=0.0, work=each), OPTIONS, priority)

    assert load().waiting_ms == 0
    waiting = work(1, left_ms=300.0)
    # Of those that wait, foreground calls go before background ones.
    assert load(waiting).waiting_ms == 0
    assert load(waiting, priority="background").waiting_ms == 300
    assert load(dataclasses.replace(waiting, priority="background"), priority="background").waiting_ms == 0
    stream = work(2, stage="decode", batchable=True, token_ms=20.0, tpot_ms=40.0)
    # Half of the engine's time is the stream's.
    assert load(waiting, stream, priority="background").waiting_ms == pytest.approx(600)
    assert load(stream).token_share > load().token_share == 1
    full = [work(i, stage="decode", rest_ms=1000.0 + i) for i in range(OPTIONS.running)]
    assert load(*full).waiting_ms == 1000


def test_a_full_queue_says_so_and_when_to_come_back():
    options = SchedulerOptions(queued=3, app_queued=2)
    for apps, part in (("ab", "None"), ("aa", "of this app"), ("bbc", "3 calls wait")):
        waiting = [work(number, app=app) for number, app in enumerate(apps)]
        running = work(9, stage="decode")
        assert part in str(queue_refusal(Queue(now_ms=0, work=[*waiting, running]), "a", options))
    queue = Queue(now_ms=0, work=[work(1, rest_ms=9_000.0)])
    assert retry_after_s(queue) == 5
    assert retry_after_s(Queue(now_ms=0, work=())) == 1
