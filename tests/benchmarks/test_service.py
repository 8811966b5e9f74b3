"""`jaxllm bench service`: loads, judged outcomes, servers, and real services on the packaged model."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.harness.bench import Run
from benchmarks.harness.machine import memory_of
from benchmarks.peers.llama import text_of_token
from benchmarks.peers.process import PeerFailed
from benchmarks.service import systems as servers
from benchmarks.service.load import NOT_ANSWERED, send
from benchmarks.service.outcomes import (
    BLOCK_CALLS,
    LEAST_BLOCKS,
    Cell,
    Window,
    draw,
    figures,
    judged,
    lead,
    load_rows,
    memory_rows,
    said,
)
from benchmarks.service.run import Plan, Reference, _loads, run, write_outcomes
from jaxllm.serving.ground.bundles import find_model

PLAN = Plan(
    loads=(0.5,), clients=(2,), repetitions=1, load_s=2.0, clients_s=1.0, patience_s=30.0, prompt_tokens=32,
    answer_tokens=8, reference_repeats=1, starts=1,
)  # fmt: skip


@pytest.mark.slow
def test_services_under_load():
    told, kept = [], []
    plan = dataclasses.replace(PLAN, systems=("no-planning",))
    rows = run(Run(plan=plan, model=find_model("default"), tell=told.append, kept=kept))
    assert {row.system for row in rows} == {"jaxllm", "jaxllm-no-planning"}
    assert any("idle whole model: TTFT" in each for each in told)
    # Without objectives there is nothing to plan.
    assert {each.system for each in kept if "clients" in each.case} == {"jaxllm"}
    outcomes = [one for each in kept for window in each.windows for one in window.outcomes]
    assert outcomes
    assert all(one.answered for one in outcomes), {one.error for one in outcomes}
    levels = {one.level for each in kept if "planning" in each.system for one in each.windows[0].outcomes}
    assert levels == {100}
    metrics = {row.metric for row in rows}
    assert {"goodput_per_s", "slo_met", "ttft_ms", "tpot_ms", "decode_tokens_per_s", "refused"} <= metrics
    assert {"peak_memory_bytes", "load_ms"} <= metrics


SIZES = servers.Sizes(prompt_tokens=32, answer_tokens=8, context_tokens=160, vocab_size=300)
REFERENCE = Reference((16, 160), (10.0, 10.0), 10.0)


def loads_of(repetition, plan):
    return _loads("m", Run(plan=plan), SIZES, REFERENCE, None, repetition)


def test_no_prompt_is_sent_twice():
    """Else a server would have it in its cache, from another load."""
    plan = Plan(
        loads=(0.5, 1.0), clients=(1, 8), load_s=2.0, clients_s=1.0, prompt_tokens=32, answer_tokens=8
    )
    loads = [load for repetition in range(2) for load in loads_of(repetition, plan)]
    assert len(loads) == 8
    prompts = [{request.prompt for request in load.requests} for load in loads]
    assert all(len(each) == len(load.requests) for each, load in zip(prompts, loads, strict=True))
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    # The same ones for each system, whenever they are drawn.
    assert [load.requests for load in loads_of(1, plan)] == [load.requests for load in loads[4:]]


LENGTHS = servers.Sizes(prompt_tokens=64, answer_tokens=16, context_tokens=256, vocab_size=300)


def test_traces_of_azure_and_mooncake_keep_their_bursts(tmp_path):
    path = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{second:02}.0000000,{1000 + second},100" for second in (1, 2, 2, 2, 11)]
    path.write_text("\n".join(lines))
    arrivals = servers.Arrivals.read(path)
    assert arrivals.times_s == [0, 1, 1, 1, 10]
    made, faster = servers.from_trace(LENGTHS, arrivals, rate_per_s=5, duration_s=1, seed=0)
    assert faster == 10
    assert [each.time_s for each in made] == [0, 0.1, 0.1, 0.1, 1]
    # Their median becomes the one that was asked for.
    assert {each.answer_tokens for each in made} == {16}
    path = tmp_path / "mooncake.jsonl"
    told = {"input_length": 50, "output_length": 5}
    requests = [{"timestamp": 1000 * at, "hash_ids": [0, at], **told} for at in (3, 1, 2)]
    path.write_text("\n".join(map(json.dumps, requests)))
    assert servers.Arrivals.read(path).times_s == [1, 2, 3]


REQUEST = servers.Request(app=3, prompt=tuple(range(16, 116)), answer_tokens=11)


def outcome(due_s=1.0, *, first_s: float | None = 1.1, last_s=2.1, tokens=11, limits=(150.0, 100.0), **more):
    raw = {
        "number": 0, "due_s": due_s, "sent_s": due_s + 0.001, "first_s": first_s, "last_s": last_s,
        "ended_s": last_s, "tokens": tokens, "status": 200, "error": None,
        "cached_tokens": None, "health_ms": [2.0, 4.0],
        "jaxllm": {"level": 60, "kept_tokens": 50, "reused_tokens": 25, "engine_tpot_ms": 99.9}, **more,
    }  # fmt: skip
    return judged(raw, REQUEST, limits)


@pytest.mark.parametrize(
    ("changed", "status", "met"),
    [
        ({}, "answered", True),
        ({"limits": (99.0, 101.0)}, "answered", False),
        ({"limits": (101.0, 99.0)}, "answered", False),
        # One token has no time per further one.
        ({"limits": (101.0, 1e-3), "tokens": 1, "last_s": 1.1}, "answered", True),
        ({"error": "queue", "status": 429, "first_s": None}, "refused", False),
        ({"error": NOT_ANSWERED, "status": 0, "first_s": None}, "failed", False),
        ({"error": "broken in the middle"}, "failed", False),
        ({"first_s": None, "last_s": None, "tokens": 0}, "failed", False),
    ],
)
def test_outcomes_are_judged(changed, status, met):
    found = outcome(**changed)
    if not changed:
        assert (found.ttft_ms, found.tpot_ms, found.level) == (pytest.approx(100), pytest.approx(100), 60)
    assert (found.status, found.met) == (status, met)
    assert json.loads(json.dumps(found.to_json()))["app"] == "app-4"


def test_a_window_counts_what_was_due_in_it():
    late = outcome(5.0, first_s=9.0, last_s=9.5)
    refused = outcome(4.0, error="no", status=429, first_s=None)
    window = Window(1.0, 6.0, [outcome(0.5, first_s=0.5, last_s=1.5), outcome(), late, refused])
    found = figures([window])
    assert found["goodput_per_s", ""] == pytest.approx(1 / 5)
    assert found["requests_per_s", ""] == pytest.approx(2 / 5)
    assert found["slo_met", ""] == found["slo_met", "app <40,70>"] == pytest.approx(1 / 3)
    # Half of the tokens of the first answer, and those of the second.
    assert found["decode_tokens_per_s", ""] == pytest.approx((5.5 + 11) / 5)
    assert found["ttft_ms", "percentile 50"] == pytest.approx((100 + 4000) / 2)
    assert found["health_ms", "percentile 50"] == 3
    assert figures([Window(1.0, 6.0, [outcome()])])["overhead_ms", "percentile 99"] == pytest.approx(0.1)
    assert (found["level", ""], found["kept", ""], found["reused", ""]) == (60, 0.5, 0.25)
    # A peer tells in the usage what its cache had.
    peer = figures([Window(1.0, 6.0, [outcome(jaxllm=None, cached_tokens=75)])])
    assert peer["reused", ""] == 0.75
    assert not {("level", ""), ("kept", "")} & set(peer)
    assert ("ttft_ms", "percentile 50") not in figures([Window(1.0, 6.0, [refused])])
    # Repeated loads are judged together.
    twice = figures([window, Window(1.0, 6.0, [refused])])
    assert twice["goodput_per_s", ""] == pytest.approx(1 / 10)
    assert twice["slo_met", ""] == pytest.approx(1 / 4)


def test_what_is_given_up_was_waited_for():
    """Else the percentiles of a server that answers few calls would be those of its quick answers."""
    slow = outcome(error=NOT_ANSWERED, status=200, first_s=None, ended_s=31.0)
    begun = outcome(error=NOT_ANSWERED, status=200, first_s=3.0, last_s=4.0, ended_s=31.0)
    assert (slow.ttft_ms, begun.ttft_ms) == (pytest.approx(30_000), pytest.approx(2000))
    assert not slow.met
    found = figures([Window(0.0, 6.0, [outcome(), begun, slow])])
    assert found["ttft_ms", "percentile 50"] == pytest.approx(2000)
    assert found["failed", ""] == pytest.approx(2 / 3)


def windows(met, count=BLOCK_CALLS * LEAST_BLOCKS):
    """A load of two repetitions, one call a second, in time where `met` says so of its number."""
    half = count // 2
    return [
        Window(0.0, half, [
            outcome(due, first_s=due + (0.1 if met(run * half + due) else 0.2), last_s=due + 0.3)
            for due in range(half)
        ])
        for run in range(2)
    ]  # fmt: skip


def test_intervals_are_of_blocks_of_calls():
    every, none = windows(lambda _: True), windows(lambda _: False)
    assert said(every) == "95 % in [1, 1] of 50 calls"
    # Two of each block, whichever blocks are drawn.
    some = windows(lambda number: number % BLOCK_CALLS < 2)
    assert said(some) == "95 % in [0.4, 0.4] of 50 calls"
    assert lead(every, some) == "ours paired 95 % in [2.50x, 2.50x]"
    assert lead(every, none) == "ours paired 95 % in [infx, infx]"
    # Blocks that differ make an interval around the share.
    half = windows(lambda number: number % (2 * BLOCK_CALLS) < BLOCK_CALLS)
    low, high = (float(each.strip("[],")) for each in (said(half) or "").split()[3:5])
    assert 0.1 < low < 0.5 < high < 0.9
    assert lead(windows(lambda _: True, count=20), none) is None


def test_rows_and_figures(tmp_path):
    missed = outcome(first_s=1.4, last_s=2.4)
    runs = {
        "jaxllm": ([outcome(), outcome()], [outcome(), missed]),
        "jaxllm-no-planning": ([missed] * 2, [outcome()] * 2),
    }
    cells = [
        Cell("m, load 1", system, [Window(0.0, 2.0, each) for each in outcomes])
        for system, outcomes in runs.items()
    ]
    rows = load_rows(cells, objectives=True)
    found = {(row.case, row.system, row.metric): row for row in rows}
    ours = found["m, load 1", "jaxllm", "goodput_per_s"]
    assert (ours.value, ours.ratio, ours.baseline, ours.note) == (
        0.75, 1.5, "jaxllm-no-planning", "runs 0.5 to 1",
    )  # fmt: skip
    quicker = found["m, load 1, percentile 50", "jaxllm", "ttft_ms"]
    assert (quicker.value, quicker.ratio) == pytest.approx((100, 2.5))
    assert found["m, load 1, app <40,70>", "jaxllm", "slo_met"].value == 0.75
    clients = load_rows([Cell("m, 8 clients", "jaxllm", [Window(0.0, 2.0, [outcome()])])], objectives=False)
    assert not {"goodput_per_s", "slo_met"} & {row.metric for row in clients}
    (only,) = (row for row in clients if row.metric == "decode_tokens_per_s")
    (mine, *_, other) = memory_rows("m", {"jaxllm": [30, 10, 20], "llama-server": [10]}, {"jaxllm": 5 << 20})
    assert (mine.value, mine.ratio, other.system) == (20, 0.5, "llama-server")
    assert mine.note == "proportional share at the end 5 MB"
    kept = [Cell("m, load 1", "jaxllm", [Window(0.0, 6.0, [outcome()])])]
    draw([*rows, only], tmp_path, kept)
    assert {each.name for each in tmp_path.iterdir()} == {
        "service_goodput.png", "service_clients.png", "service_ttft.png",
    }  # fmt: skip
    write_outcomes(tmp_path / "outcomes.jsonl", kept)
    line = json.loads((tmp_path / "outcomes.jsonl").read_text())
    assert (line["system"], line["slo"], line["met"], line["repetition"]) == ("jaxllm", "<40,70>", True, 0)


FAKE = f"""#!{sys.executable}
import runpy
runpy.run_module("tests.benchmarks.fake_server", run_name="__main__")
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return servers.Conditions(
        model=folder / "model.jaxllm", floats=folder, weights="int8", threads=1, context_tokens=128,
        folder=folder, keys=[f"key {number}" for number in range(6)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def binary(given):
    path = given.folder / "llama-server"
    path.write_text(FAKE)
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def server(given, binary):
    made = {}

    def gguf(folder, file_type, **_):
        made["file"] = (folder, file_type)
        return Path("model.gguf")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "gguf_of", gguf)
        with servers.LlamaServer(binary, 4).start(given, lambda *_: None) as running:
            assert made["file"] == (given.folder, "Q8_0")
            yield running
    running.close()


def job(server, *counts, **more):
    requests = [
        {"time_s": 0.1 * number, "headers": {}, "body": {"prompt": [1, 2], "max_tokens": count}}
        for number, count in enumerate(counts)
    ]
    return {"url": server.url, "requests": requests, "patience_s": 3.0, **more}


def test_every_request_has_an_outcome(server):
    """Requests that are not answered, or not whole, hold up no other."""
    found = send(job(server, 2, 12, 429, 404, 1, 3), alive=server.require_alive)
    slow, whole, refused, failed, broken, cut = sorted(found, key=lambda each: each["number"])
    assert (slow["error"], slow["tokens"]) == ("not answered", 0)
    assert (whole["error"], whole["tokens"], whole["status"]) == (None, 12, 200)
    assert whole["cached_tokens"] == 1
    assert (whole["jaxllm"]["level"], whole["jaxllm"]["reused_tokens"]) == (50, 1)
    assert sum(len(each["health_ms"]) for each in found) > 2
    assert 0.1 <= whole["due_s"] <= whole["sent_s"] < whole["first_s"] < whole["last_s"]
    assert (refused["status"], failed["status"]) == (429, 404)
    assert "no" in refused["error"]
    assert "broken" in broken["error"]
    assert cut["error"]


def test_clients_wait_for_answers(server):
    found = send(job(server, 10, 11, clients=2, duration_s=0.5))
    assert len(found) > 2
    assert {each["number"] for each in found} == {0, 1}
    assert all(each["error"] is None for each in found)
    assert all(each["due_s"] < 0.5 for each in found)
    # Two at a time.
    times = sorted([(each["sent_s"], 1) for each in found] + [(each["last_s"], -1) for each in found])
    running = [sum(change for _, change in times[: place + 1]) for place in range(len(times))]
    assert max(running) == 2


def test_the_last_answers_do_not_have_the_server_for_themselves(server):
    """A client goes on while what was sent in the measured time is answered."""
    found = send(job(server, 2, *[10] * 90, clients=2, duration_s=0.3, patience_s=0.7))
    # One waits for an answer that does not come; the other one's later requests are no outcomes.
    (slow,) = (each for each in found if each["number"] == 0)
    assert slow["error"] == NOT_ANSWERED
    assert slow["ended_s"] == pytest.approx(1.0, abs=0.3)
    assert all(each["error"] is None and each["due_s"] < 0.3 for each in found if each is not slow)


def test_each_is_sent_once_without_a_duration(server):
    found = send(job(server, 10, 10, 10, clients=1, duration_s=0))
    assert [each["number"] for each in found] == [0, 1, 2]
    # Over a connection of its own.
    assert len({each["jaxllm"]["port"] for each in found}) == 3
    # The memory of a server is seen from outside.
    assert memory_of(server.pid, "VmHWM") > 1 << 20
    assert 0 < memory_of(server.pid, "Pss", "smaps_rollup") <= memory_of(server.pid, "VmHWM")
    with pytest.raises(PeerFailed, match="load generator failed: KeyError"):
        send({"requests": []})


def test_a_server_that_ends_says_why_and_ends_the_load(binary):
    command = [sys.executable, "-m", "tests.benchmarks.fake_server", "--port", "0"]
    with pytest.raises(PeerFailed, match="server of mine exited with 1; it said last: no port"):
        servers.Server("mine", command, port=servers.free_port(), ready="/health", threads=1)
    with servers.Server("mine", [str(binary), "--port", str(port := servers.free_port())],
                port=port, ready="/health", threads=1) as own:  # fmt: skip
        own._process.kill()
        own._process.wait()
        with pytest.raises(PeerFailed, match="killed by SIGKILL"):
            send(job(own, 2), alive=own.require_alive)
    own.close()


def test_systems_are_asked_in_their_own_words(given):
    request = servers.Request(app=3, prompt=(20, 21), answer_tokens=5)
    message = servers.OurService().message(request, (100.0, 10.0), given)
    assert message["headers"] == {"Authorization": "Bearer key 3"}
    assert message["body"]["slo"] == {"ttft_ms": 100.0, "tpot_ms": 10.0}
    assert message["body"]["ignore_eos"]
    assert "slo" not in servers.OurService().message(request, None, given)["body"]
    body = servers.LlamaServer(Path("llama-server")).message(request, None, given)["body"]
    assert (body["prompt"], body["samplers"], body["top_k"]) == ((20, 21), ["top_k"], 1)
    text = servers.LlamaServer().message(request, None, given)["body"]["prompt"]
    assert text == text_of_token(20) + text_of_token(21)
