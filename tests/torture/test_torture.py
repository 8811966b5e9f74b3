"""A short turn of torture, and every input that once found a fault; `make torture` takes longer ones."""

import json
import random

import pytest

from tests.serving.contexts.mutations import places
from tests.tiny import write_tiny_bundle
from tests.torture.codecs import BundleFile, Json
from tests.torture.edits import Edit, apply_edits, draw_edits, value_at
from tests.torture.grammars import send_grammars
from tests.torture.kinds import KINDS
from tests.torture.mutations import REGRESSIONS, mutate, replay_regressions, use_edited
from tests.torture.outcome import Case, Outcome, Tally
from tests.torture.process import Victim
from tests.torture.victims import make_victims

CASES, SEED = 120, 1
# Those whose victims take long to make, or whose copies long to use, are for longer turns.
QUICK = [kind for kind in KINDS if kind.name not in ("program", "graphs")]


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torture") / "victims"
    make_victims(folder, {kind.name for kind in QUICK})
    return folder


@pytest.mark.slow
def test_mutated_files_are_used_or_refused(victims, tmp_path):
    """What was not changed is used; and inputs that once found a fault find none."""
    victim, tally = Victim(tmp_path), Tally()
    try:
        for kind in QUICK:
            outcome = use_edited(victims, victims / "copy", victim, kind, [], deep=False)
            assert outcome.ending == "ok", (kind.name, outcome)
    finally:
        victim.close()
    mutate(victims, tmp_path, tally, cases=CASES, seed=SEED, lanes=1, kinds=QUICK)
    assert [each.to_json() for each in tally.faults] == []
    assert set(tally.counts) == {kind.name for kind in QUICK}
    # Some of either, or the mutations are none.
    for ending in ("ok", "refused"):
        assert sum(each[ending] for each in tally.counts.values()) > CASES // 8
    replay_regressions(victims, tmp_path, tally, kinds=QUICK)
    assert [each.to_json() for each in tally.faults] == []
    assert tally.total("regressions") or not list(REGRESSIONS.glob("*.json"))


@pytest.mark.slow
@pytest.mark.alone
def test_hostile_grammars_are_answered_or_refused_while_others_stream(tmp_path):
    tally = Tally()
    path = write_tiny_bundle(tmp_path / "model.jaxllm")
    send_grammars(path, tally, cases=60, seed=SEED, context_tokens=128)
    assert [each.to_json() for each in tally.faults] == []
    assert tally.total() == 62
    for ending in ("ok", "refused"):
        assert sum(each[ending] for each in tally.counts.values()) > 10


def test_a_seed_draws_the_same_edits_and_json_keeps_them(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"b": [1, {"c": "x"}], "d": 0.5}))
    codecs = {"a.json": Json()}
    for seed in range(50):
        first, second = (draw_edits(random.Random(seed), tmp_path, codecs, {}) for _ in range(2))
        again = [Edit.from_json(json.loads(json.dumps(vars(each)))) for each in first]
        assert repr(first) == repr(second) == repr(again)


def test_an_edit_changes_what_it_says(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    document = {"b": [1, {"c": "x"}], "d": 0.5}
    (source / "a.json").write_text(json.dumps(document))
    assert set(places(document)) == {("b",), ("b", 0), ("b", 1), ("b", 1, "c"), ("d",)}
    assert value_at(document, ("b", 1, "c")) == "x"
    edits = [
        Edit("a.json", "set", ("b", 1, "c"), 7),
        Edit("a.json", "delete", ("d",)),
        Edit("a.json", "set", ("e", 0), 1),
    ]
    copy = apply_edits(source, edits, {"a.json": Json()}, tmp_path / "copy")
    assert json.loads((copy / "a.json").read_text()) == {"b": [1, {"c": 7}]}
    assert json.loads((source / "a.json").read_text()) == document


def test_checksums_of_a_changed_bundle_are_right(tmp_path):
    from jaxllm.bundle import Bundle
    from tests.tiny import write_tiny_bundle

    path = write_tiny_bundle(tmp_path / "m.jaxllm")
    raw, codec = bytearray(path.read_bytes()), BundleFile()
    begin, end = codec.body(bytes(raw))
    raw[(begin + end) // 2] ^= 1
    path.write_bytes(codec.signed(bytes(raw)))
    with Bundle.open(path) as bundle:
        bundle.verify()


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_told_and_replaced(tmp_path):
    victim = Victim(tmp_path, patience_s=30)
    (tmp_path / "profile.json").write_text("{}")
    try:
        assert victim.ask(Case(use="profile", path=tmp_path)).ending == "refused"
        assert victim._process is not None
        victim._process.kill()
        victim._process.wait()
        assert victim.ask(Case(use="profile", path=tmp_path)).ending == "refused"
        assert victim.ask(Case(use="no such use", path=tmp_path)) == Outcome(
            ending="crash", says="exit code 1"
        )
        victim._patience_s = 0.0
        assert victim.ask(Case(use="profile", path=tmp_path)).ending == "hang"
    finally:
        victim.close(kill=True)
