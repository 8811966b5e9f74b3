"""The parent's side of the protocol, against small programs that keep it or break it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.peers import Opening
from benchmarks.peers.process import Child, PeerFailed

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


def test_answers_come_back_and_closing_ends_the_process():
    with child() as peer:
        assert (peer.facts, peer.settings, peer.open_peak_bytes) == ({"a": 1}, ["only"], 7)
        assert peer.answer([1, 2], 3, "only")["decode_ms"] == 2.0
        pid = peer._process.pid
        assert is_alive(pid)
    assert not is_alive(pid)
    with pytest.raises(PeerFailed, match="closed"):
        peer.answer([1], 1, "only")


def test_progress_is_passed_on():
    seen = []
    body = 'print(json.dumps({"progress": ["load", 1, 2]}), flush=True)'
    with child(body, progress=lambda *step: seen.append(step)):
        assert seen == [("load", 1, 2)]


def test_an_error_of_the_child_names_it_and_leaves_it_usable():
    body = """
    def answer(command):
        if command["do"] == "score": send(error="no such token")
        else: send(ids=[5], prefill_ms=1, decode_ms=1)
    """
    with child(body) as peer:
        with pytest.raises(PeerFailed, match="the peer cannot score: no such token"):
            peer.score([1], [2])
        assert peer.answer([1], 0, "only")["ids"] == [5]


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


def test_a_child_that_dies_at_work_is_noticed():
    with child("def answer(command): os.kill(os.getpid(), 11)") as peer:
        with pytest.raises(PeerFailed, match="the peer was killed by SIGSEGV"):
            peer.answer([1], 1, "only")
        with pytest.raises(PeerFailed, match="SIGSEGV"):
            peer.answer([1], 1, "only")


def test_a_child_that_hangs_is_killed_when_closed(monkeypatch):
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


def test_threads_are_pinned():
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system does not pin")
    before = os.sched_getaffinity(0)
    with child("send_cores = len(os.sched_getaffinity(0))\ndef answer(c): send(ids=[send_cores])") as peer:
        assert peer.answer([1], 1, "only")["ids"] == [1]
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_real_child_does_not_outlive_a_killed_parent():
    """Its standard input ends with its parent, even while it is busy."""
    parent_code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-m", "benchmarks.peers.child"], stdin=subprocess.PIPE)
        print(child.pid, flush=True)
        time.sleep(60)
    """
    root = Path(__file__).parents[3]
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
