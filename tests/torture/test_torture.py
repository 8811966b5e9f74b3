"""A short turn of torture, and every input that once found a fault; `make torture` takes longer ones."""

import pytest

from tests.tiny import write_tiny_bundle
from tests.torture.grammars import send_grammars
from tests.torture.kinds import KINDS
from tests.torture.mutations import REGRESSIONS, mutate, replay_regressions, use_edited
from tests.torture.process import Case, Outcome, Tally, Victim
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
def test_hostile_grammars_are_answered_or_refused(tmp_path):
    tally = Tally()
    path = write_tiny_bundle(tmp_path / "model.jaxllm")
    send_grammars(path, tally, cases=60, seed=SEED, context_tokens=128)
    assert [each.to_json() for each in tally.faults] == []
    assert tally.total() == 60
    for ending in ("ok", "refused"):
        assert sum(each[ending] for each in tally.counts.values()) > 10


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_reported_and_replaced(tmp_path):
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
