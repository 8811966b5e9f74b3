"""Finds the objectives that a device cannot meet with any choice, and the prompt lengths of these misses.

A short prompt is prefilled in one chunk, whose time hardly depends on the level: it may miss an objective
that longer prompts meet. A service logs this when it is opened, before calls miss.
"""

from collections.abc import Iterable, Mapping, Sequence

from jaxllm.elastic.slo import SLOS
from jaxllm.serving.elastic.objectives import Objective
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.engine.request import DEFAULT_MAX_TOKENS


def unmet(
    planner: Planner, objectives: Iterable[Objective] = SLOS, *, answer_tokens: int = DEFAULT_MAX_TOKENS
) -> dict[Objective, tuple[int, ...]]:
    """The objectives that no choice meets at some profiled prompt lengths, with those lengths (see
    `Planner.lengths_missed`).

    Args:
      planner: planner of the device.
      objectives: objectives to check, the paper's six by default.
      answer_tokens: maximum number of tokens of an answer.

    Raises:
      ConfigError: an objective limits energy and the profile has none.
    """
    missed = {each: planner.lengths_missed(each, answer_tokens=answer_tokens) for each in objectives}
    return {each: lengths for each, lengths in missed.items() if lengths}


def described(missed: Mapping[Objective, Sequence[int]], profiled: Sequence[int]) -> str:
    """The result of `unmet` as text; empty if every objective can be met.

    Args:
      missed: prompt lengths at which each objective is missed.
      profiled: all profiled prompt lengths.
    """
    parts = [f"{each} for prompts of {_lengths(tuple(at), profiled)}" for each, at in missed.items()]
    return "; ".join(parts)


def _lengths(missed: Sequence[int], profiled: Sequence[int]) -> str:
    if len(missed) == len(profiled):
        return "any length"
    if tuple(profiled[: len(missed)]) == tuple(missed):
        return f"up to {missed[-1]} tokens"
    if tuple(profiled[-len(missed) :]) == tuple(missed):
        return f"{missed[0]} tokens and more"
    return f"{', '.join(map(str, missed))} tokens"
