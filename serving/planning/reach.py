"""Which objectives a device cannot meet, whatever is chosen, and at which prompt lengths.

A prompt of few tokens is read in one chunk, whose time hardly depends on the level: an objective may be out
of its reach that longer prompts meet. Who opens a service should know before its calls miss.
"""

from collections.abc import Iterable, Mapping, Sequence

from jaxllm.elastic.slo import SLOS
from serving.planning.objectives import Objective
from serving.planning.planner import Planner
from serving.request import DEFAULT_MAX_TOKENS


def unmet(
    planner: Planner, objectives: Iterable[Objective] = SLOS, *, answer_tokens: int = DEFAULT_MAX_TOKENS
) -> dict[Objective, tuple[int, ...]]:
    """The objectives that no choice meets at some of the prompt lengths that were profiled, with these (see
    `Planner.lengths_missed`).

    Args:
      planner: of the device.
      objectives: the paper's six by default.
      answer_tokens: how long answers may get.

    Raises:
      ConfigError: an objective is about energy and the profile has none.
    """
    missed = {each: planner.lengths_missed(each, answer_tokens=answer_tokens) for each in objectives}
    return {each: lengths for each, lengths in missed.items() if lengths}


def described(missed: Mapping[Objective, Sequence[int]], profiled: Sequence[int]) -> str:
    """What `unmet` found, for people; empty where every objective can be met.

    Args:
      missed: the lengths of each.
      profiled: all lengths.
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
