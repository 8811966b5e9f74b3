"""Times a trace with a model as large as a phone's, and takes the answers of a small trained one.

In the times of a model that answers within milliseconds, the host's own work and the tiny LM's pass are large
parts, at any level, so they say little of larger models. Here an elastic model of random weights, of a known
shape and with the same levels and tokenizer, is timed and replays the trace; the times of other systems'
models are interpolated between its levels by their share of the parameters in layers. Right answers are those
of the trained models.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.elastic.baselines import PRUNED, SWAP, Size, swap_ms
from benchmarks.elastic.levels import move
from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import layer_parameters
from jaxllm.errors import ConfigError
from serving.engine import Engine
from serving.planning.profile import DeviceProfile


def check_same_levels(ours: Engine, larger: Engine) -> None:
    """Raises ConfigError unless the larger model can be timed instead of ours."""
    if ours.levels != larger.levels:
        raise ConfigError(f"levels {larger.levels} cannot stand for the times of levels {ours.levels}")
    if ours.model.bundle.tokenizer_files() != larger.model.bundle.tokenizer_files():
        raise ConfigError("a model of another tokenizer cannot stand for the times of this one")


def as_large(
    larger: Engine, profile: DeviceProfile, ours: Engine, others: Mapping[str, Sequence[Size]]
) -> tuple[dict[str, list[Size]], dict[int, DeviceProfile]]:
    """Other systems' models with the times that they would have if they were as large.

    Args:
      larger: the elastic model that is timed.
      profile: its times.
      ours: the small elastic model that `others` are compared with.
      others: the models of each baseline.

    Returns:
      The same models with the times of changing to them; profiles of their engines, by `id`.
    """
    whole = layer_parameters(ours.cfg.whole)
    shares: dict[int, dict[int, float]] = {}
    for size in (size for many in others.values() for size in many):
        part = layer_parameters(size.engine.runner_at(size.level).cfg) / whole
        shares.setdefault(id(size.engine), {})[size.level] = part
    profiles = {name: of_shares(profile, _shares(larger), each) for name, each in shares.items()}
    changed = {name: list(many) for name, many in others.items()}
    changed[PRUNED] = [
        dataclasses.replace(size, change_ms=move(larger, size.level)[0]) for size in others[PRUNED]
    ]
    if SWAP in others:
        # The time of a read is proportional to the size of the file.
        read_ms = swap_ms(larger.model.bundle.path) / ours.model.bundle.path.stat().st_size
        changed[SWAP] = [
            dataclasses.replace(size, change_ms=read_ms * size.engine.model.bundle.path.stat().st_size)
            for size in others[SWAP]
        ]
    return changed, profiles


def of_shares(
    profile: DeviceProfile, known: Mapping[int, float], wanted: Mapping[int, float]
) -> DeviceProfile:
    """Times of models with other shares of the parameters than the levels of a profile.

    Between two levels times are interpolated; below the smallest, towards the time without layers that a line
    through all levels gives.

    Args:
      profile: of the levels.
      known: its levels' shares of the parameters in layers, in (0, 1].
      wanted: shares of the models, by their level.
    """
    shares = np.array([known[level] for level in profile.levels])
    names = tuple(sorted(wanted))
    asked = np.array([wanted[name] for name in names])

    def interpolated(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        columns = []
        for times in np.array(table).T:
            without = float(np.clip(np.polyfit(shares, times, 1)[1], 0.0, times[0]))
            columns.append(np.interp(asked, [0.0, *shares], [without, *times]))
        return tuple(map(tuple, np.array(columns).T.tolist()))

    return DeviceProfile(
        levels=names,
        tokens=profile.tokens,
        chunk_tokens=profile.chunk_tokens,
        exact_chunks=profile.exact_chunks,
        ttft_ms=interpolated(profile.ttft_ms),
        tpot_ms=interpolated(profile.tpot_ms),
    )


def _shares(engine: Engine) -> dict[int, float]:
    whole = layer_parameters(engine.runner_at(WHOLE).cfg)
    return {level: layer_parameters(engine.runner_at(level).cfg) / whole for level in engine.levels}
