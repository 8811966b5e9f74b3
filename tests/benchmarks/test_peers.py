"""Systems in child processes: both sides of the protocol, the alternation, and transformers as a peer."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.bench import TimedPlan
from benchmarks.peers import SYSTEMS, Opening, Peer
from benchmarks.peers import process as alternation
from benchmarks.peers.child import Server
from benchmarks.peers.process import Child, PeerFailed, System, alternate
from benchmarks.peers.torch_transformers import TransformersSession
from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.runners.scorer import Scorer
from tests.tiny import TINY, tiny_params, write_tiny_folder

OPENING = Opening(peer="jaxllm", model=Path("nowhere"), format="f32", threads=1)
# Says that it has opened a model, then answers each line with what `answer` makes of the command.
CHILD = """
import json, os, sys, time
def send(**message):
    print(json.dumps(message | {"cpu_s": 0.0, "peak_bytes": 7}), flush=True)
def answer(command):
    send(ids=[1], prefill_ms=1.0, decode_ms=2.0)
BODY
sys.stdin.readline()
send(facts={"a": 1}, settings=["only"])
for line in sys.stdin:
    answer(json.loads(line))
"""


def child(body: str = "", **how) -> Child:
    program = CHILD.replace("BODY", textwrap.dedent(body))
    return Child("the peer", OPENING, command=[sys.executable, "-c", program], **how)


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_answers_and_errors_come_back_and_closing_ends_the_process():
    seen = []
    body = """
    print(json.dumps({"progress": ["load", 1, 2]}), flush=True)
    def answer(command):
        if command["do"] == "score": send(error="no such token")
        else: send(ids=[len(os.sched_getaffinity(0))], prefill_ms=1.0, decode_ms=2.0)
    """
    cores = os.sched_getaffinity(0)
    with child(body, progress=lambda *step: seen.append(step)) as peer:
        assert seen == [("load", 1, 2)]
        assert (peer.facts, peer.settings, peer.open_peak_bytes) == ({"a": 1}, ["only"], 7)
        # An error names the child and leaves it usable, on the one core of its thread.
        with pytest.raises(PeerFailed, match="the peer cannot score: no such token"):
            peer.score([1], [2])
        answer = peer.answer([1, 2], 3, "only")
        assert (answer["decode_ms"], answer["ids"]) == (2.0, [1])
        pid = peer._process.pid
        assert is_alive(pid)
    assert os.sched_getaffinity(0) == cores
    assert not is_alive(pid)
    with pytest.raises(PeerFailed, match="closed"):
        peer.answer([1], 1, "only")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('library banner', flush=True)", "broke the protocol: 'library banner"),
        ("print('first line\\nlast words', file=sys.stderr); sys.exit(3)", "exited with 3.*last words"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL .*memory"),
    ],
)
def test_a_child_that_fails_to_open_says_why_and_is_gone(body, message, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(PeerFailed, match=message):
        child(body)
    assert not is_alive(started[0].pid)


def test_a_child_that_dies_at_work_is_noticed_and_one_that_hangs_is_killed_when_closed(monkeypatch):
    with child("def answer(command): os.kill(os.getpid(), 11)") as peer:
        for _ in range(2):
            with pytest.raises(PeerFailed, match="the peer was killed by SIGSEGV"):
                peer.answer([1], 1, "only")
    monkeypatch.setattr("benchmarks.peers.process._CLOSE_TIMEOUT_S", 0.1)
    body = """
    import signal
    def answer(command):
        send(ids=[1], prefill_ms=1, decode_ms=1)
        while True: time.sleep(1)
    """
    with child(body) as peer:
        peer.answer([1], 1, "only")
        pid = peer._process.pid
    assert not is_alive(pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_real_child_does_not_outlive_a_killed_parent():
    """Its standard input ends with its parent, even while it is busy."""
    parent_code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.peers.child"], stdin=subprocess.PIPE)
        print(child.pid, flush=True)
        time.sleep(60)
    """
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)], stdout=subprocess.PIPE, cwd=root
    )
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


class Echo:
    """A session whose first token is the prompt's length, then counts up."""

    settings = ("a", "b")

    def __init__(self):
        self.calls = []

    def facts(self):
        return {"weight_bytes": 1}

    def prefill(self, prompt, setting):
        self.calls.append(("prefill", setting))
        self.token = len(prompt)
        return self.token

    def decode(self, tokens, setting):
        self.calls.append(("decode", setting))
        return [self.token + i + 1 for i in range(tokens)]

    def score(self, tokens, targets):
        if not tokens:
            raise ConfigError("no tokens")
        return [-0.5] * len(targets)


def open_echo(opening, progress):
    progress("load", 1, 1)
    return Echo()


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setitem(SYSTEMS, "echo", Peer("echo", open_echo))
    out = io.StringIO()
    server = Server(out)
    opening = Opening(peer="echo", model=tmp_path, format="f32", threads=1)
    answer = server.handle({"do": "open", "opening": json.loads(json.dumps(opening.to_json()))})
    assert (answer["facts"], answer["settings"]) == ({"weight_bytes": 1}, ["a", "b"])
    assert json.loads(out.getvalue()) == {"progress": ["load", 1, 1]}
    return server


def test_answers_are_timed_and_repeated_and_scores_are_losses(server):
    command = {"do": "answer", "prompt": [7, 7, 7], "tokens": 2, "setting": "b", "repeats": 3}
    answer = server.handle(command)
    assert answer["ids"] == [3, 4, 5]
    assert min(answer["prefill_ms"], answer["decode_ms"]) > 0
    assert server._session.calls == [("prefill", "b"), ("decode", "b")] * 3
    assert answer["peak_bytes"] > 1 << 20
    assert server.handle({"do": "score", "tokens": [1, 2], "targets": [2, 3]})["losses"] == [0.5, 0.5]


def test_failures_become_answers(server, capsys):
    assert server.handle({"do": "score", "tokens": [], "targets": []})["error"] == "no tokens"
    assert "KeyError" in server.handle({"do": "score"})["error"]
    assert "Traceback" in capsys.readouterr().err
    closed = Server(io.StringIO()).handle({"do": "score", "tokens": [1], "targets": [1]})
    assert "no model is open" in closed["error"]


class Scripted:
    """A child that takes the given (prefill_ms, decode_ms) per setting; 1000 when disturbed."""

    def __init__(self, times, disturbed=(), log=None, name=""):
        self.times, self._disturbed = times, list(disturbed)
        self.disturbed = False
        self.log, self.name = [] if log is None else log, name

    def answer(self, prompt, tokens, setting, *, repeats):
        self.disturbed = bool(self._disturbed) and self._disturbed.pop(0)
        self.log.append((self.name, len(prompt), setting))
        prefill, decode = self.times[setting]
        if self.disturbed:
            prefill, decode = 1000.0, 1000.0
        return {"prefill_ms": prefill * len(prompt), "decode_ms": decode * tokens, "ids": []}

    def wait_until_asleep(self):
        pass


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(alternation, "wait_for_quiet", lambda: None)


def run(*systems, lengths=(10,), rounds=3, patience_s=60.0, **more):
    plan = TimedPlan(prompt_tokens=lengths, decode_tokens=4, rounds=rounds, patience_s=patience_s)
    return alternate(systems, 99, plan=plan, progress=lambda *_: None, **more)


def test_each_phase_keeps_its_fastest_setting():
    child = Scripted({"x": (10.0, 30.0), "y": (20.0, 25.0)})
    result = run(System("peer", child, ("x", "y")))["peer", 10]
    assert result.ms == {"prefill": 100.0, "decode": 100.0}
    assert result.settings == {"prefill": "x", "decode": "y"}
    assert (result.rate("prefill", 10), result.rate("decode", 4)) == (100.0, 40.0)
    # Where there is no choice none is mentioned.
    assert run(System("ours", Scripted({"x": (1.0, 1.0)}), ("x",)))["ours", 10].settings == {}


def test_systems_alternate_within_each_round_and_prompt():
    log = []
    a, b = (Scripted({"x": (200.0, 1.0)}, log=log, name=name) for name in "ab")
    run(System("a", a, ("x",)), System("b", b, ("x",)), lengths=(10, 20), rounds=2)
    timed = [(name, tokens) for name, tokens, _ in log[-8:]]
    first = [("b", 10), ("a", 10), ("b", 20), ("a", 20)]
    assert timed == [*first, ("a", 10), ("b", 10), ("a", 20), ("b", 20)]


def test_a_disturbed_sample_is_taken_again_while_there_is_patience():
    # Two answers of the first round are disturbed, and two of the timed ones.
    child = Scripted({"x": (1.0, 1.0)}, [True, False, True, False, True, True, False])
    result = run(System("peer", child, ("x",)))["peer", 10]
    assert (result.ms["prefill"], result.disturbed) == (10.0, 0)
    # Without it disturbed samples stay and are counted.
    child = Scripted({"x": (1.0, 1.0)}, [True] * 100)
    result = run(System("peer", child, ("x",)), patience_s=0.0)["peer", 10]
    assert (result.disturbed, result.samples) == (3, 3)
    # One clean sample says more than two disturbed ones.
    child = Scripted({"x": (1.0, 1.0)}, [True, True, True, False, True])
    result = run(System("peer", child, ("x",)), patience_s=0.0)["peer", 10]
    assert (result.ms["prefill"], result.disturbed, result.samples) == (10.0, 0, 1)


def test_memory_is_measured_before_and_after_each_sample():
    speeds = iter([10.0, 30.0, 50.0, 70.0])
    ours = System("ours", Scripted({"x": (1.0, 500.0)}), ("x",))
    result = run(ours, rounds=2, patience_s=0.0, bytes_per_s=lambda: next(speeds))["ours", 10]
    # Two seconds at 20 bytes a second, and at 60.
    assert result.readable_bytes == pytest.approx((40 + 120) / 2)
    with pytest.raises(StopIteration):
        next(speeds)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("torch") / "tiny", cfg=TINY, params=tiny_params(TINY))


@pytest.fixture(scope="module")
def session(folder):
    for library in ("torch", "transformers"):
        pytest.importorskip(library)
    opening = Opening(peer="transformers", model=folder, format="f32", threads=1, context_tokens=64)
    return TransformersSession(opening, lambda *_: None)


def test_it_decodes_and_scores_as_ours_in_every_setting(session, folder):
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,))
    ours, prompt = Engine.open(folder, weights="f32", options=options), list(range(20))
    expected = ours.generate(prompt, GenerationConfig(max_tokens=12, ignore_eos=True)).tokens
    for setting in session.settings * 2:  # the second time with caches that have been used
        first = session.prefill(prompt, setting)
        assert [first, *session.decode(11, setting)] == list(expected)
    tokens = np.random.default_rng(1).integers(0, TINY.vocab_size, 40).tolist()
    scorer = Scorer(ours.runner)
    scorer.prepare(len(tokens))
    expected = scorer.score(tokens, [*tokens[1:], 3])
    np.testing.assert_allclose(session.score(tokens, [*tokens[1:], 3]), expected, atol=1e-4)
