"""The registry of cases, what they share, and the prompts that they read.

A case's name is the golden's file, a dash and its name in there. Cases read the same prompts, so that answers
of runners that must agree can be compared by eye. Every model is tiny and random, or packaged.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxllm.serving.engine.engine import Engine
from tests.goldens import opening
from tests.goldens.bundles import Bundles
from tests.goldens.opening import Answer

PROMPT = "the hello there, hello the hello there"
STORY = "Once upon a time, there was a little girl named Lily who"
_DRAW = np.random.default_rng(5)
# Longer than two prefill chunks, than one and than none.
LONG = _DRAW.integers(0, 250, 41).tolist()
TURNS = [_DRAW.integers(0, 250, size).tolist() for size in (37, 5, 21)]
# Answers that repeat themselves, greedy and drawn: what the text has said before is drafted.
FEW_WORDS = tuple(
    opening.sampled(temperature=temperature, logit_bias=tuple((token, 60.0) for token in (77, 101, 105)))
    for temperature in (0.0, 0.8)
)


class Models:
    """Bundles of a folder and the engines that cases share."""

    def __init__(self, folder: Path) -> None:
        self.bundles = Bundles(folder)
        self._folder, self._count = folder, 0
        self._exits = contextlib.ExitStack()
        self._opened = functools.cache(self._open)

    def engine(self, weights: str, codec: str = "", levels: tuple[int, ...] = ()) -> Engine:
        """The elastic model in memory, with some levels."""
        return self._opened(self.bundles.elastic(weights), codec, levels)

    def packaged(self, name: str, levels: tuple[int, ...] = ()) -> Engine:
        """A packaged model in memory."""
        return self._opened(name, "", levels)

    def new_folder(self) -> Path:
        """One that is nobody's yet."""
        self._count += 1
        return self._folder / f"store-{self._count}"

    def close(self) -> None:
        """Closes all engines."""
        self._exits.close()

    def _open(self, path: Path | str, codec: str, levels: tuple[int, ...]) -> Engine:
        engine = opening.open_engine(path, levels=levels, kv_codec=codec)
        return self._exits.enter_context(contextlib.closing(engine))

    def programs(self) -> Path:
        """The folder of exported programs."""
        folder = self._folder / "programs"
        return folder if folder.exists() else opening.export_programs(self.bundles.shallow(), folder)


Case = Callable[[Models], list[Answer]]
Making = Callable[..., list[Answer]]
CASES: dict[str, Case] = {}


def cases(named: Mapping[str, Sequence[object]]) -> Callable[[Making], Making]:
    """Registers cases by what the function takes behind the models."""

    def registered(function: Making) -> Making:
        for name, values in named.items():
            assert name not in CASES, name
            CASES[name] = functools.partial(_made, function, tuple(values))
        return function

    return registered


def case(name: str) -> Callable[[Making], Making]:
    """Registers a function of the models alone."""
    return cases({name: ()})


def _made(function: Making, values: Sequence[object], models: Models) -> list[Answer]:
    return function(models, *values)
