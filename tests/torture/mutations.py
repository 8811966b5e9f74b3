"""Mutates files of every kind, thousands of times, and has each copy used in a process of its own."""

import concurrent.futures
import json
import random
from collections.abc import Sequence
from pathlib import Path

from tests.torture.edits import Edit, apply_edits, draw_edits
from tests.torture.kinds import KINDS, Kind
from tests.torture.process import FAULTS, Case, Outcome, Tally, Victim

REGRESSIONS = Path(__file__).parent / "regressions"


def mutate(
    victims: Path,
    scratch: Path,
    tally: Tally,
    *,
    cases: int,
    seed: int,
    lanes: int,
    kinds: Sequence[Kind] = KINDS,
) -> None:
    """Has mutated copies used, `cases` of them divided among kinds by their shares.

    Args:
      victims: the folder that `make_victims` wrote.
      scratch: for copies and processes.
      tally: counts what came of it.
      cases: how many.
      seed: of all of them.
      lanes: processes at a time.
      kinds: of files.
    """
    whole = sum(kind.share for kind in kinds)
    planned = [
        (kind, number) for kind in kinds for number in range(max(1, round(cases * kind.share / whole)))
    ]
    random.Random(seed).shuffle(planned)

    def run(lane: int) -> None:
        # Beside the victims' own folders, where uses look for what belongs to them.
        victim, copies = Victim(scratch / f"process-{lane}"), victims / f"copy-{lane}"
        try:
            for kind, number in planned[lane::lanes]:
                name = f"{seed}:{kind.name}:{number}"
                edits, outcome = one_case(victims, copies, victim, kind, random.Random(name))
                tally.add(kind.name, name, outcome, [vars(each) for each in edits])
        finally:
            victim.close()

    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        for each in [pool.submit(run, lane) for lane in range(lanes)]:
            each.result()


def one_case(
    victims: Path, copies: Path, victim: Victim, kind: Kind, draw: random.Random
) -> tuple[list[Edit], Outcome]:
    """Draws one mutation and has it used."""
    codecs = kind.files(victims)
    edits = draw_edits(draw, victims / kind.name, codecs, kind.values)
    return edits, use_edited(victims, copies, victim, kind, edits, deep=draw.random() < kind.deep)


def use_edited(
    victims: Path, copies: Path, victim: Victim, kind: Kind, edits: Sequence[Edit], *, deep: bool
) -> Outcome:
    """Has a victim's copy with these changes used."""
    apply_edits(victims / kind.name, edits, kind.files(victims), copies)
    forged = any(each.kind in ("set", "delete", "body") for each in edits)
    if forged and kind.sign is not None:
        kind.sign(copies)
    return victim.ask(Case(use=kind.use or kind.name, path=copies, deep=deep, forged=forged))


def replay_regressions(victims: Path, scratch: Path, tally: Tally, *, kinds: Sequence[Kind] = KINDS) -> None:
    """Has every input of these kinds used that once found a fault (`regressions/*.json`)."""
    by_name = {kind.name: kind for kind in kinds}
    victim = Victim(scratch / "process-regressions")
    try:
        for path in sorted(REGRESSIONS.glob("*.json")):
            found = json.loads(path.read_text())
            if found["kind"] not in by_name:
                continue
            edits = [Edit.from_json(each) for each in found["case"]]
            kind = by_name[found["kind"]]
            for deep in (False, True) if kind.deep else (False,):
                outcome = use_edited(victims, victims / "copy-again", victim, kind, edits, deep=deep)
                tally.add("regressions", path.name, outcome, found["case"])
    finally:
        victim.close()


def keep_regressions(tally: Tally, folder: Path) -> list[Path]:
    """Writes the mutations that failed, one of each fault, as `replay_regressions` reads them."""
    kept: dict[tuple[str, str, str], Path] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for fault in tally.faults:
        key = (fault.kind, fault.outcome.ending, fault.outcome.says[:60])
        if key in kept or fault.case is None or fault.outcome.ending not in FAULTS:
            continue
        path = folder / f"{fault.kind}-{fault.outcome.ending}-{len(kept)}.json"
        path.write_text(json.dumps(fault.to_json(), indent=1) + "\n")
        kept[key] = path
    return list(kept.values())
