"""Runs all of it: `python -m tests.torture --minutes 20`; prints seeds, keeps what failed."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

# What twenty minutes do on two cores.
_MINUTES = 20.0
_AMOUNTS = {"mutations": 60_000, "kills": 1_500, "faults": 3_000, "interrupts": 2_250, "grammars": 2_000}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--minutes", default=_MINUTES, show_default=True, help="how much to do, by what 20 minutes do on 2 cores"
)
@click.option("--seed", type=int, help="of everything; a new one unless given")
@click.option("--kind", "kinds", multiple=True, help="mutate files of this kind alone; may be repeated")
@click.option("--only", type=click.Choice([*_AMOUNTS]), help="one part alone")
@click.option("--lanes", default=os.cpu_count() or 1, show_default=True, help="processes at a time")
@click.option(
    "--keep", type=click.Path(path_type=Path), help="folder for mutations that failed, as regressions"
)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of a table")
def main(
    minutes: float,
    seed: int | None,
    kinds: tuple[str, ...],
    only: str | None,
    lanes: int,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Harms files, processes, storage and calls, sends hostile grammars, and tells what was lost, crashed,
    hung or was not caught."""
    seed = int(time.time()) if seed is None else seed
    share = minutes / _MINUTES
    amounts = {name: round(amount * share) for name, amount in _AMOUNTS.items()}
    if only is not None:
        amounts = {only: amounts[only]}
    with tempfile.TemporaryDirectory(prefix="jaxllm-torture-") as folder:
        tally = _run(Path(folder), amounts, seed, lanes, kinds, Console(stderr=True, quiet=as_json))
        from tests.torture.mutations import keep_regressions

        kept = [] if keep is None else keep_regressions(tally, keep)
    if as_json:
        counts = {name: dict(each) for name, each in tally.counts.items()}
        print(
            json.dumps({"seed": seed, "counts": counts, "faults": [each.to_json() for each in tally.faults]})
        )
    else:
        _print(tally, seed, kept)
    sys.exit(1 if tally.faults else 0)


def _run(folder, amounts, seed, lanes, kinds, console):
    # Before JAX is imported; each part runs on small models.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAXLLM_THREADS", "1")
    os.environ["JAXLLM_CACHE"] = str(folder / "cache")
    from tests.torture.grammars import send_grammars
    from tests.torture.kills import harm_calls, kill
    from tests.torture.kinds import KINDS
    from tests.torture.mutations import mutate, replay_regressions
    from tests.torture.process import Tally
    from tests.torture.victims import make_victims

    chosen = [kind for kind in KINDS if not kinds or kind.name in kinds]
    if not chosen:
        raise click.UsageError(f"there are files of kinds {', '.join(kind.name for kind in KINDS)}")
    tally, victims = Tally(), folder / "victims"
    wanted = {kind.name for kind in chosen} | {"folder"} if "mutations" in amounts else {"folder"}
    make_victims(victims, wanted)
    scratch = folder / "scratch"
    scratch.mkdir()
    if "mutations" in amounts and not kinds:
        replay_regressions(victims, scratch, tally)
    for name, amount in amounts.items():
        console.print(f"{amount} {name}, seed {seed}")
        match name:
            case "mutations":
                mutate(victims, scratch, tally, cases=amount, seed=seed, lanes=lanes, kinds=chosen)
            case "kills":
                kill(victims, scratch, tally, kills=amount, seed=seed)
            case "grammars":
                send_grammars(None, tally, cases=amount, seed=seed, lanes=lanes)
            case _:
                harm_calls(name, tally, amount)
    return tally


def _print(tally, seed, kept):
    console = Console()
    table = Table(title=f"seed {seed}")
    endings = ("ok", "refused", "uncaught", "crash", "hang", "big", "wrong")
    for name in ("", *endings):
        table.add_column(name, justify="left" if not name else "right")
    for kind, counts in tally.counts.items():
        table.add_row(kind, *(str(counts[each]) if counts[each] else "" for each in endings))
    console.print(table)
    for fault in tally.faults:
        console.print(
            f"{fault.kind} {fault.seed}: {fault.outcome.ending}: {fault.outcome.says}", soft_wrap=True
        )
    for path in kept:
        console.print(f"kept {path}")
    console.print(f"{tally.total()} cases, {len(tally.faults)} faults")


if __name__ == "__main__":
    main()
