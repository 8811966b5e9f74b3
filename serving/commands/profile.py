"""`jaxllm profile`: how long each level of a model takes on this device."""

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from jaxllm.errors import ConfigError
from serving.console import (
    context_option,
    prefill_option,
    print_json,
    processors_option,
    progress_bars,
    read_text,
)
from serving.engine import Engine
from serving.models import levels_of
from serving.options import EngineOptions
from serving.prefill.options import Mode, PrefillOptions
from serving.prefill.processors import prepare_processors
from serving.profile import (
    DeviceProfile,
    Energy,
    check_energy,
    load_profile,
    profile_path,
    save_profile,
)
from serving.profiling import REPEATS, measure
from serving.reach import described, unmet
from serving.service import planner_of


@click.command("profile")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@context_option
@prefill_option
@processors_option
@click.option("--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True)
@click.option(
    "--energy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='What tokens cost here, measured elsewhere: {"prefill_joules": [...], "decode_joules": [...]}, a '
    "number per level.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile_command(
    bundle: Path | None,
    context_tokens: int,
    prefill: Mode | None,
    processors: int,
    repeats: int,
    energy: Path | None,
    as_json: bool,
) -> None:
    """Measure every level of BUNDLE (default: the packaged model), and keep the times for the service."""
    levels = levels_of(bundle)
    costs = None if energy is None else _read_energy(energy)
    if costs is not None:
        # The whole model has a number, too.
        check_energy(costs, len(levels) + 1)
    if processors > 1:
        prepare_processors()
    how = PrefillOptions(mode=prefill or "", processors=processors)
    with progress_bars() as progress:
        engine = Engine.open(
            bundle,
            options=EngineOptions(context_tokens=context_tokens, levels=levels, prefill=how),
            progress=progress,
        )
        profile = measure(engine, repeats=repeats, progress=progress)
    path = profile_path(engine.bundle, engine.options)
    profile = dataclasses.replace(profile, energy=costs).beside(load_profile(path))
    save_profile(profile, path)
    missed = unmet(planner_of(engine, profile)) if levels else {}
    if as_json:
        print_json(
            {
                "model": engine.bundle.layout.name,
                "profile": str(path),
                "unmet": {str(each): lengths for each, lengths in missed.items()},
                **profile.to_json(),
            }
        )
        return
    _show(profile)
    if missed:
        click.echo(f"no choice meets here: {described(missed, profile.tokens)}")
    click.echo(f"kept in {path}")


def _read_energy(path: Path) -> Energy:
    try:
        data = json.loads(read_text(path))
        return Energy(**{name: tuple(data[name]) for name in ("prefill_joules", "decode_joules")})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: prefill_joules and decode_joules are missing or malformed") from error


def _show(profile: DeviceProfile) -> None:
    table = Table(title="time to first token, ms (time per token, ms)")
    table.add_column("level")
    for tokens in profile.tokens:
        table.add_column(f"{tokens} tokens", justify="right")
    for level, ttft, tpot in zip(profile.levels, profile.ttft_ms, profile.tpot_ms, strict=True):
        cells = (f"{first:.2f} ({each:.2f})" for first, each in zip(ttft, tpot, strict=True))
        table.add_row(f"{level} %", *cells)
    Console().print(table)
    if profile.prefill is None:
        return
    table = Table(title="reading prompts in integers, ms (in floats, ms)")
    table.add_column("level")
    for tokens in profile.tokens:
        table.add_column(f"{tokens} tokens", justify="right")
    times = profile.prefill
    for level, integers, floats in zip(profile.levels, times.integer_ms, times.float_ms, strict=True):
        table.add_row(f"{level} %", *(f"{a:.2f} ({b:.2f})" for a, b in zip(integers, floats, strict=True)))
    Console().print(table)
