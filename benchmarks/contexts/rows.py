"""Makes rows of switches: times to switch and to keep a context, and how many contexts a limit allows."""

from collections.abc import Mapping

from benchmarks.contexts.replay import Switches
from benchmarks.contexts.systems import OURS
from benchmarks.measuring.report import Row, compared
from benchmarks.measuring.storage import Device

# Mean switches that are not noticed, or hardly.
LIMITS_MS = (10.0, 25.0)


def switch_rows(case: str, found: Mapping[str, Switches], device: Device) -> list[Row]:
    """Mean switching latency of every system, the mean time to the first token after a switch, and the mean
    time to keep a context after a call, with flushes to storage and without, and the mean energy of a call
    where this machine has a meter; ours against each other."""
    notes = {}
    for name, each in found.items():
        how = device.note or {"direct": "read by O_DIRECT", "buffered": "read through the page cache"}.get(
            each.caching, "nothing on storage"
        )
        notes[name] = f"{each.note}; {how}"
    first = "restores the context, and computes the new turn and the tokens that are in no whole chunk"
    kept = "makes room for the call's tokens, encodes and stores them"
    flushed = f"{kept}; every system flushes them: what a call said is safe from a power cut when it ends"
    finish = {name: (each.mean_finish_ms, each.mean_flush_ms) for name, each in found.items()}
    joules = {name: each.joules for name, each in found.items() if each.joules is not None}
    energy = "of all processor packages, from a call's switch until the next call"
    return [
        *compared(
            {name: each.mean_ms for name, each in found.items()},
            ours=OURS, case=case, metric="switch_ms", unit="ms", notes=notes, lower_is_better=True,
        ),
        *compared(
            {name: each.mean_ttft_ms for name, each in found.items()},
            ours=OURS, case=case, metric="ttft_ms", unit="ms", notes=dict.fromkeys(found, first),
            lower_is_better=True,
        ),
        *compared(
            {name: whole for name, (whole, _) in finish.items()},
            ours=OURS, case=case, metric="finish_ms", unit="ms", notes=dict.fromkeys(found, flushed),
            lower_is_better=True,
        ),
        *compared(
            {name: max(0.0, whole - flush) for name, (whole, flush) in finish.items()},
            ours=OURS, case=case, metric="finish_unflushed_ms", unit="ms",
            notes=dict.fromkeys(found, f"{kept}, without the time of flushes"), lower_is_better=True,
        ),
        *compared(
            {name: each.mean_ms + each.mean_finish_ms for name, each in found.items()},
            ours=OURS, case=case, metric="switch_and_finish_ms", unit="ms",
            notes=dict.fromkeys(found, "all that keeping contexts adds to a call, flushes included"),
            lower_is_better=True,
        ),
        *(
            compared(
                joules, ours=OURS, case=case, metric="joules_per_call", unit="J",
                notes=dict.fromkeys(joules, energy), lower_is_better=True,
            )
            if joules
            else ()
        ),
    ]  # fmt: skip


def most_contexts(
    case: str, found: Mapping[int, Mapping[str, Switches | None]], limit_ms: float
) -> list[Row]:
    """The largest number of active contexts, of those tried, whose mean switch stays within a limit.

    Args:
      case: of the rows.
      found: by number of contexts, then by system; None where it could not hold a context in memory.
      limit_ms: of a mean switch.
    """
    tried = sorted(found)
    systems = list(found[tried[0]])
    most = {}
    for system in systems:
        each = [found[count][system] for count in tried]
        within = [one is not None and one.mean_ms <= limit_ms for one in each]
        # Numbers below the first that is too large.
        passed = within.index(False) if False in within else len(within)
        most[system] = tried[passed - 1] if passed else 0
    note = f"tried: {', '.join(map(str, tried))}"
    metric = f"contexts_within_{limit_ms:.0f}_ms"
    rows = [
        Row(
            case=case, system=OURS, metric=metric, value=most[OURS], unit="contexts", baseline=system,
            ratio=most[OURS] / most[system] if most[system] else None, note=note,
        )
        for system in systems
        if system != OURS
    ]  # fmt: skip
    return rows + [
        Row(case=case, system=system, metric=metric, value=most[system], unit="contexts", note=note)
        for system in systems
        if system != OURS
    ]
