"""Profiles of a device: the times of a model's levels, measured once (`profiling.py`) and used by the
planner.

A profile belongs to one bundle, one device and one set of engine options. It is stored in the user's cache
directory, because a bundle is one immutable file for all devices.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.host.user_cache import make_private_folder, private_file
from jaxllm.serving.runners.runner import prompt_cost

_MAX_FILE_BYTES = 1 << 20
_LARGEST = 1e12
# Limits of a profile from a file: the time to plan grows with these numbers.
_MOST_TOKENS, _MOST_LENGTHS, _MOST_SPREAD = 1 << 20, 1 << 10, 64
# Prompt lengths with cached times.
_LISTED_TOKENS = 1 << 13


# Times `[levels, lengths]`.
Rows = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy of tokens on a device, from a meter or a data sheet, of each level in order.

    Attributes:
      prefill_joules: per token of the prompt.
      decode_joules: per token of the answer.
    """

    prefill_joules: tuple[float, ...]
    decode_joules: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTimes:
    """Milliseconds of each level and prompt length of a device's profile.

    Attributes:
      integer_ms: times of integer prefill; of float prefill for levels with too large a loss.
      float_ms: times of float prefill.
    """

    integer_ms: Rows
    float_ms: Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Times of a bundle's levels on a device.

    Attributes:
      levels: levels in percent, ascending, the last one 100.
      tokens: measured prompt lengths, ascending.
      chunk_tokens: prefill chunk lengths of the engine.
      exact_chunks: whether the time of a chunk depends on its tokens, not on its whole length.
      ttft_ms: time to the first token, for each level and length.
      tpot_ms: time per further token, for each level and length.
      energy: energy of tokens, if known.
      prefill: times of integer and float prefill, of an engine that has both.
      coarse: whether it is an initial profile, measured at few levels and lengths (see
        `jaxllm.serving.elastic.profiling`).
    """

    levels: tuple[int, ...]
    tokens: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    ttft_ms: Rows
    tpot_ms: Rows
    energy: Energy | None = None
    prefill: PrefillTimes | None = None
    exact_chunks: bool = False
    coarse: bool = False

    def __post_init__(self) -> None:
        for name in ("levels", "tokens", "chunk_tokens"):
            values = getattr(self, name)
            whole = all(type(each) is int and 0 < each <= _MOST_TOKENS for each in values)
            if not 1 <= len(values) <= _MOST_LENGTHS or not whole or list(values) != sorted(set(values)):
                raise ConfigError(
                    f"{name} of a device profile must be ascending, at most {_MOST_TOKENS}, "
                    f"got {values!r:.80}"
                )
        if self.chunk_tokens[-1] > _MOST_SPREAD * self.chunk_tokens[0]:
            raise ConfigError(
                f"chunk_tokens of a device profile lie too far apart: {self.chunk_tokens!r:.80}"
            )
        shape = (len(self.levels), len(self.tokens))
        for name in ("ttft_ms", "tpot_ms"):
            _require_times(name, getattr(self, name), shape)
        for name in () if self.prefill is None else ("integer_ms", "float_ms"):
            _require_times(name, getattr(self.prefill, name), shape)
        if self.energy is not None:
            check_energy(self.energy, len(self.levels))

    def ttft(self, level: int, tokens: int) -> float:
        """Milliseconds to the first token of a prompt of `tokens` at a level of the profile."""
        return float(self.ttfts((level,), (tokens,))[0, 0])

    def tpot(self, level: int, tokens: int) -> float:
        """Milliseconds per further token after a prompt of `tokens` at a level of the profile."""
        return float(self.tpots((level,), (tokens,))[0, 0])

    def joules(self, level: int, tokens: int, answer_tokens: int) -> float:
        """The energy of an answer.

        Raises:
          ConfigError: the profile has no energy.
        """
        return float(self.all_joules((level,), (tokens,), answer_tokens)[0, 0])

    def integers_are_faster(self, level: int, tokens: int) -> bool:
        """Whether integer prefill of `tokens` is faster than float prefill; False if unknown."""
        if self.prefill is None or level not in self.levels:
            return False
        both = self.prefill.integer_ms, self.prefill.float_ms
        integers, floats = (self._of_chunks(rows, (level,), (tokens,))[0, 0] for rows in both)
        return bool(integers < floats)

    def ttfts(self, levels: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """`ttft` of levels and prompt lengths, `[levels, tokens]` float64."""
        return self._times(0, levels, tokens)

    def tpots(self, levels: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """`tpot` of levels and prompt lengths, `[levels, tokens]` float64."""
        return self._times(1, levels, tokens)

    def all_joules(self, levels: Sequence[int], tokens: Sequence[int], answer_tokens: int) -> np.ndarray:
        """`joules` of levels and prompt lengths, `[levels, tokens]` float64."""
        if self.energy is None:
            raise ConfigError(
                "this device's profile has no energy; add it with `jaxllm profile --energy FILE`"
            )
        places = self._places(levels)
        prefill = np.array(self.energy.prefill_joules)[places, None]
        decode = np.array(self.energy.decode_joules)[places, None]
        return np.array(tokens) * prefill + answer_tokens * decode

    def completed_by(self, earlier: "DeviceProfile | None") -> "DeviceProfile":
        """This profile, completed by an earlier one of the same engine: levels that were not measured again,
        and energy if the earlier one has it for all levels."""
        if earlier is None or earlier.coarse:
            return self
        if (earlier.tokens, earlier.chunk_tokens) != (self.tokens, self.chunk_tokens):
            return self
        levels = tuple(sorted({*self.levels, *earlier.levels}))

        def rows(name: str) -> Rows:
            by_level = dict(zip(earlier.levels, getattr(earlier, name), strict=True))
            by_level |= dict(zip(self.levels, getattr(self, name), strict=True))
            return tuple(by_level[level] for level in levels)

        both = [each for each in (self, earlier) if each.levels == levels]
        return dataclasses.replace(
            self,
            levels=levels,
            ttft_ms=rows("ttft_ms"),
            tpot_ms=rows("tpot_ms"),
            energy=next((each.energy for each in (self, *both) if each.energy), None),
            prefill=next((each.prefill for each in both if each.prefill), None),
        )

    def _times(self, which: int, levels: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Times to the first token (0) or per further token (1) of levels and prompt lengths."""
        listed = self._listed[which]
        if max(tokens) < listed.shape[1]:
            return listed[:, list(tokens)][self._places(levels)]
        return self._interpolated(levels, tokens)[which]

    @functools.cached_property
    def _listed(self) -> tuple[np.ndarray, np.ndarray]:
        """Both times of all levels at every prompt length from 0 to the longest measured one, or to
        `_LISTED_TOKENS`. Cached, because each plan looks up many."""
        return self._interpolated(self.levels, range(min(self.tokens[-1], _LISTED_TOKENS) + 1))

    def _interpolated(self, levels: Sequence[int], tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Both times of levels and prompt lengths, interpolated between measured ones."""
        tpot_ms = np.array(self.tpot_ms)[self._places(levels)]
        further = _between(np.array(tokens), np.array(self.tokens), tpot_ms)
        return self._of_chunks(self.ttft_ms, levels, tokens), further

    def _of_chunks(self, times: Rows, levels: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Prefill times `[levels, tokens]`, interpolated by the cost of chunks from those `[levels, lengths]`
        of the profile."""
        known = np.array(_costs(self.tokens, self.chunk_tokens, self.exact_chunks))
        wanted = np.array(_costs(tuple(tokens), self.chunk_tokens, self.exact_chunks))
        return _between(wanted, known, np.array(times)[self._places(levels)])

    def _places(self, levels: Sequence[int]) -> list[int]:
        for level in levels:
            if level not in self.levels:
                known = ", ".join(map(str, self.levels))
                raise ConfigError(f"level {level} was not profiled; there are {known}")
        return [self.levels.index(level) for level in levels]

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "DeviceProfile":
        """Reads a dict that `to_json` made.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        try:
            fields = _tuples(data)
            for name, kind in (("energy", Energy), ("prefill", PrefillTimes)):
                fields[name] = None if fields[name] is None else kind(**fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"malformed device profile: {error!r:.200}") from error


def _tuples(data: Any) -> Any:
    """Plain data with tuples in place of lists."""
    if isinstance(data, Mapping):
        return {name: _tuples(each) for name, each in data.items()}
    return tuple(map(_tuples, data)) if isinstance(data, list) else data


def check_energy(energy: Energy, levels: int) -> None:
    """Raises ConfigError unless the energy has as many levels."""
    for name in ("prefill_joules", "decode_joules"):
        _require_times(name, (getattr(energy, name),), (1, levels))


def save_profile(profile: DeviceProfile, path: Path) -> None:
    """Writes a profile, whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    text = json.dumps(profile.to_json())
    whole = {"xxh3_128": xxhash.xxh3_128_hexdigest(text.encode()), "record": text}
    try:
        make_private_folder(path.parent)
        with atomic_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(json.dumps(whole).encode())
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be written ({error.strerror})") from error


def load_profile(path: Path) -> DeviceProfile | None:
    """Reads a profile; None if the file is missing.

    Raises:
      ConfigError: it cannot be read, is damaged or malformed, or is writable by others.
    """
    try:
        with private_file(path) as number, open(number, "rb", closefd=False) as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: the profile cannot be read ({error.strerror})") from error
    try:
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError("too large for a device profile")
        whole = json.loads(raw)
        text = whole["record"]
        if xxhash.xxh3_128_hexdigest(text.encode()) != whole["xxh3_128"]:
            raise ConfigError("its checksum is wrong")
        return DeviceProfile.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error if isinstance(error, ConfigError) else f"malformed device profile: {error!r:.200}"
        raise ConfigError(f"{path}: {reason}; remove it, and measure again with `jaxllm profile`") from error


@functools.lru_cache(maxsize=8192)
def _costs(lengths: tuple[int, ...], chunk_tokens: tuple[int, ...], exact: bool) -> tuple[int, ...]:
    """Costs of prompts of these lengths in chunks; cached, because every request needs them."""
    return tuple(prompt_cost(each, chunk_tokens, exact=exact) for each in lengths)


def _between(wanted: np.ndarray, known: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Interpolates times `[levels, n]` known at `known` `[n]` to `wanted` `[m]`; extrapolates from the last
    two."""
    if len(known) == 1:
        return np.repeat(times, len(wanted), axis=1)
    place = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
    # Two lengths may cost the same chunks.
    slope = (times[:, place] - times[:, place - 1]) / np.maximum(1, known[place] - known[place - 1])
    found = times[:, place] + slope * (wanted - known[place])
    return np.where(wanted <= known[0], times[:, :1], found)


def _require_times(name: str, rows: Sequence[Sequence[Any]], shape: tuple[int, int]) -> None:
    numbers = [value for row in rows for value in row]
    square = len(rows) == shape[0] and all(len(row) == shape[1] for row in rows)
    real = all(type(value) in (int, float) and 0 < value <= _LARGEST for value in numbers)
    if not square or not real:
        raise ConfigError(f"{name} of a device profile must be {shape[0]} x {shape[1]} numbers above 0")
