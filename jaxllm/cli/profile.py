"""`jaxllm profile`: measures the speed of each level of a model on this device."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jaxllm.cli.console import print_columns, print_json, progress_bars, read_text
from jaxllm.cli.lazy import EngineCommand
from jaxllm.cli.shared_options import (
    context_option,
    json_option,
    model_argument,
    path_option,
    prefill_option,
    processors_option,
)
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.serving.elastic.profile import DeviceProfile
    from jaxllm.serving.ground.int8_prefill_options import Mode

REPEATS = 5


@click.command("profile", cls=EngineCommand)
@model_argument("bundle", required=False)
@context_option
@prefill_option(
    "Measure prompts in floats, in 8-bit integers (takes a bundle of `jaxllm calibrate prefill`), or in "
    "both, for services to choose by.  [default: float; int8 with --processors 2]"
)
@processors_option
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=REPEATS,
    show_default=True,
    help="Number of repetitions of each measurement; the median counts.",
)
@path_option(
    "--energy",
    help="Also store the energy of tokens, measured elsewhere: a JSON file "
    '{"prefill_joules": [...], "decode_joules": [...]} with a number per level.',
)
@json_option
def profile_command(
    bundle: Path | None,
    context_tokens: int,
    prefill: "Mode | None",
    processors: int,
    repeats: int,
    energy: Path | None,
    as_json: bool,
) -> None:
    """Measure the speed of every level of a model, for the service to plan with.

    Runs BUNDLE, a file or a packaged model's name (default: default), and writes the profile of this device
    into the cache folder, where services find it. Prints the objectives that no level meets here.

    \b
    Example:
      jaxllm profile model.jaxllm
      jaxllm profile model.jaxllm --prefill auto
    """
    from jaxllm.serving.elastic.planner import described, unmet
    from jaxllm.serving.elastic.profile import Energy, check_energy, load_profile, save_profile
    from jaxllm.serving.elastic.profiling import measure, profile_path
    from jaxllm.serving.ground.bundles import levels_of
    from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.int8_prefill.processors import prepare_processors
    from jaxllm.serving.opening.engine import Engine
    from jaxllm.serving.server.service import planner_of

    levels, costs = levels_of(bundle), None
    if energy is not None:
        try:
            data = json.loads(read_text(energy))
            costs = Energy(**{name: tuple(data[name]) for name in ("prefill_joules", "decode_joules")})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{energy}: prefill_joules and decode_joules are missing or malformed"
            ) from error
        # Plus the whole model.
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
    path = profile_path(engine.model.bundle, engine.options)
    profile = dataclasses.replace(profile, energy=costs).completed_by(load_profile(path))
    save_profile(profile, path)
    missed = unmet(planner_of(engine, profile)) if levels else {}
    if as_json:
        print_json(
            {
                "model": engine.model.bundle.layout.name,
                "profile": str(path),
                "unmet": {str(each): lengths for each, lengths in missed.items()},
                **profile.to_json(),
            }
        )
        return
    show_profile(profile)
    if missed:
        click.echo(f"no choice meets here: {described(missed, profile.tokens)}")
    click.echo(f"kept in {path}")


def show_profile(profile: "DeviceProfile") -> None:
    """Prints the times of a profile, a row for each level."""
    times = zip(profile.ttft_ms, profile.tpot_ms, strict=True)
    _print_pairs("time to first token, ms (time per token, ms)", profile, list(times))
    if profile.prefill is not None:
        times = zip(profile.prefill.integer_ms, profile.prefill.float_ms, strict=True)
        _print_pairs("prefill in integers, ms (in floats, ms)", profile, list(times))


def _print_pairs(
    title: str, profile: "DeviceProfile", pairs: "list[tuple[tuple[float, ...], tuple[float, ...]]]"
) -> None:
    """Prints two times per level (row) and prompt length (column)."""
    rows = [
        [f"{level} %", *(f"{a:.2f} ({b:.2f})" for a, b in zip(first, second, strict=True))]
        for level, (first, second) in zip(profile.levels, pairs, strict=True)
    ]
    print_columns(["level", *(f"{tokens} tokens" for tokens in profile.tokens)], rows, title=title)
