"""The load generator and servers' processes, with a server of scripted answers."""

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.peers.gguf_file import text_of_token
from benchmarks.peers.process import PeerFailed
from benchmarks.service import systems
from benchmarks.service.load import NOT_ANSWERED, send
from benchmarks.service.server import Server, free_port
from benchmarks.service.systems import ABLATIONS, LLAMA, Conditions, LlamaServer, OurService, systems_of
from benchmarks.service.workload import Request
from jaxllm.errors import ConfigError
from tests.tiny import TINY

FAKE = f"""#!{sys.executable}
import runpy
runpy.run_module("tests.benchmarks.service.fake_server", run_name="__main__")
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return Conditions(
        model=folder / "model.jaxllm", floats=folder, weights="int8", threads=1, context_tokens=128,
        end_ids=(7,), folder=folder, keys=[f"key {number}" for number in range(6)],
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
        patch.setattr(systems, "gguf_of", gguf)
        with LlamaServer(binary, 4).start(given, lambda *_: None) as running:
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


def test_a_broken_job_fails_aloud():
    with pytest.raises(PeerFailed, match="load generator failed: KeyError"):
        send({"requests": []})


def test_the_memory_of_a_server_is_seen_from_outside(server):
    assert server.peak_bytes() > 1 << 20
    assert 0 < server.share_bytes() <= server.peak_bytes()


def test_a_server_that_ends_says_why():
    command = [sys.executable, "-m", "tests.benchmarks.service.fake_server", "--port", "0"]
    with pytest.raises(PeerFailed, match="server of mine exited with 1; it said last: no port"):
        Server("mine", command, port=free_port(), ready="/health", threads=1)


def test_a_server_that_dies_ends_the_load(binary):
    with Server("mine", [str(binary), "--port", str(port := free_port())],
                port=port, ready="/health", threads=1) as own:  # fmt: skip
        own._process.kill()
        own._process.wait()
        with pytest.raises(PeerFailed, match="killed by SIGKILL"):
            send(job(own, 2), alive=own.require_alive)
    own.close()


def test_systems_are_asked_in_their_own_words(given):
    request = Request(app=3, prompt=(20, 21), answer_tokens=5)
    message = OurService().message(request, (100.0, 10.0), given)
    assert message["headers"] == {"Authorization": "Bearer key 3"}
    assert message["body"]["slo"] == {"ttft_ms": 100.0, "tpot_ms": 10.0}
    assert message["body"]["logit_bias"] == {"7": -100.0}
    assert "slo" not in OurService().message(request, None, given)["body"]
    # What asks for nothing is sent as it is written.
    loose = OurService().message(dataclasses.replace(request, app=0), (float("inf"), float("inf")), given)
    assert loose["body"]["slo"] == "<100,100>"
    body = LlamaServer(Path("llama-server")).message(request, None, given)["body"]
    assert (body["prompt"], body["samplers"], body["top_k"]) == ((20, 21), ["top_k"], 1)
    text = LlamaServer().message(request, None, given)["body"]["prompt"]
    assert text == text_of_token(20) + text_of_token(21)
    assert len(text) == 2


def test_systems_that_run_here(monkeypatch, binary, tmp_path):
    monkeypatch.setattr(systems, "missing", lambda binary: None if binary else "it is not installed")
    names = ["jaxllm", *(f"jaxllm-{each}" for each in ABLATIONS)]

    def chosen(wanted=(), binary=None, cfg=TINY):
        found, left_out = systems_of(wanted, binary, 8, cfg)
        return [each.name for each in found], left_out

    assert chosen() == (names, ["without llama.cpp: it is not installed"])
    assert chosen(binary=binary) == ([*names, "llama-server"], [])
    assert chosen(("no-batching",)) == (["jaxllm", "jaxllm-no-batching"], [])
    assert chosen(("none",)) == (["jaxllm"], [])
    with pytest.raises(ConfigError, match="not installed"):
        chosen((LLAMA,))
    with pytest.raises(ConfigError, match="no such file"):
        chosen(binary=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="GGUF"):
        chosen(binary=binary, cfg=dataclasses.replace(TINY, activation="gelu"))
