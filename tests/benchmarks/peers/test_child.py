"""The child's side: commands in, answers out, whatever the session does."""

import io
import json

import pytest

from benchmarks.peers import SYSTEMS, Opening
from benchmarks.peers.child import Server
from jaxllm.errors import ConfigError


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


class EchoPeer:
    name = "echo"

    def open(self, opening, progress):
        progress("load", 1, 1)
        return Echo()


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setitem(SYSTEMS, "echo", EchoPeer())
    out = io.StringIO()
    server = Server(out)
    opening = Opening(peer="echo", model=tmp_path, format="f32", threads=1)
    answer = server.handle({"do": "open", "opening": json.loads(json.dumps(opening.to_json()))})
    assert (answer["facts"], answer["settings"]) == ({"weight_bytes": 1}, ["a", "b"])
    assert json.loads(out.getvalue()) == {"progress": ["load", 1, 1]}
    return server


def test_an_answer_is_timed_and_repeated(server):
    command = {"do": "answer", "prompt": [7, 7, 7], "tokens": 2, "setting": "b", "repeats": 3}
    answer = server.handle(command)
    assert answer["ids"] == [3, 4, 5]
    assert min(answer["prefill_ms"], answer["decode_ms"]) > 0
    assert server._session.calls == [("prefill", "b"), ("decode", "b")] * 3
    assert answer["peak_bytes"] > 1 << 20
    assert answer["cpu_s"] >= 0


def test_no_token_is_decoded_for_none(server):
    server.handle({"do": "answer", "prompt": [1], "tokens": 0, "setting": "a", "repeats": 1})
    assert server._session.calls == [("prefill", "a")]


def test_a_score_is_a_loss(server):
    assert server.handle({"do": "score", "tokens": [1, 2], "targets": [2, 3]})["loss"] == 1.0


def test_failures_become_answers(server, capsys):
    assert server.handle({"do": "score", "tokens": [], "targets": []})["error"] == "no tokens"
    assert "KeyError" in server.handle({"do": "score"})["error"]
    assert "dance" in server.handle({"do": "dance"})["error"]
    assert "Traceback" in capsys.readouterr().err


def test_commands_need_an_open_model():
    answer = Server(io.StringIO()).handle({"do": "score", "tokens": [1], "targets": [1]})
    assert "no model is open" in answer["error"]
