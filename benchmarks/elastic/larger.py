"""A trace's times where the model is as large as a phone's, with the answers of a small trained one.

Of a model that answers within milliseconds the host's own work is a large part, at any level, and so is a
pass of the tiny LM: shares of its times say little of larger models. Here an elastic model of random weights,
of a known shape and with the same levels and tokenizer, is timed and replays the trace in earnest; what other
systems' models would take is read off between its levels, by their share of the parameters in layers. Which
answers are right is told by the trained models.
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
from serving.profile import DeviceProfile


def check_same_levels(ours: Engine, larger: Engine) -> None:
    """Raises ConfigError unless one can be timed in the other's place."""
    if ours.table.levels != larger.table.levels:
        raise ConfigError(
            f"levels {larger.table.levels} cannot stand for the times of levels {ours.table.levels}"
        )
    if ours.bundle.tokenizer_files() != larger.bundle.tokenizer_files():
        raise ConfigError("a model of another tokenizer cannot stand for the times of this one")


def as_large(
    larger: Engine, profile: DeviceProfile, ours: Engine, others: Mapping[str, Sequence[Size]]
) -> tuple[dict[str, list[Size]], dict[int, DeviceProfile]]:
    """Other systems' models with the times that they would have beside the larger one.

    Args:
      larger: what is timed.
      profile: its times.
      ours: the small elastic model that `others` are beside.
      others: the models of each baseline.

    Returns:
      The same models with what changing to them would take; profiles of their engines, by `id`.
    """
    whole = layer_parameters(ours.cfg.whole)
    shares: dict[int, dict[int, float]] = {}
    for size in (size for many in others.values() for size in many):
        part = layer_parameters(size.engine.table.at(size.level).cfg) / whole
        shares.setdefault(id(size.engine), {})[size.level] = part
    profiles = {name: of_shares(profile, _shares(larger), each) for name, each in shares.items()}
    changed = {name: list(many) for name, many in others.items()}
    changed[PRUNED] = [
        dataclasses.replace(size, change_ms=move(larger, size.level)[0]) for size in others[PRUNED]
    ]
    if SWAP in others:
        # Reading takes as long as there is to read.
        read_ms = swap_ms(larger.bundle.path) / ours.bundle.path.stat().st_size
        changed[SWAP] = [
            dataclasses.replace(size, change_ms=read_ms * size.engine.bundle.path.stat().st_size)
            for size in others[SWAP]
        ]
    return changed, profiles


def of_shares(
    profile: DeviceProfile, known: Mapping[int, float], wanted: Mapping[int, float]
) -> DeviceProfile:
    """Times of models that have other shares of the parameters than the levels of a profile.

    Between two levels times are interpolated; below the smallest, towards where the line through all levels
    says that no layers end.

    Args:
      profile: of the levels.
      known: its levels' shares of the parameters in layers, in (0, 1].
      wanted: those of the models, by the numbers that they go by.
    """
    shares = np.array([known[level] for level in profile.levels])
    names = tuple(sorted(wanted))
    asked = np.array([wanted[name] for name in names])

    def read_off(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        columns = []
        for times in np.array(table).T:
            without = float(np.clip(np.polyfit(shares, times, 1)[1], 0.0, times[0]))
            columns.append(np.interp(asked, [0.0, *shares], [without, *times]))
        return tuple(map(tuple, np.array(columns).T.tolist()))

    return DeviceProfile(
        levels=names,
        tokens=profile.tokens,
        chunk_tokens=profile.chunk_tokens,
        ttft_ms=read_off(profile.ttft_ms),
        tpot_ms=read_off(profile.tpot_ms),
    )


def _shares(engine: Engine) -> dict[int, float]:
    whole = layer_parameters(engine.table.at(WHOLE).cfg)
    return {level: layer_parameters(engine.table.at(level).cfg) / whole for level in engine.table.levels}
