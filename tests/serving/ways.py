"""Engines of tiny models, one for each way in which tokens are decoded."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxllm import Engine, EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests.serving.experts.conftest import CFG, SPARSE, E, drawn_params
from tests.serving.experts.conftest import budget as expert_budget
from tests.serving.memory import budget
from tests.tiny import TINY, tiny_params, write_tiny_bundle

Params = Mapping[str, np.ndarray]


def opened(
    way: str, path: Path, options: EngineOptions, *, change: Callable[[Params], Params] = dict, **more
) -> Engine:
    """Of weights in memory ("resident", "int8"), streamed, of experts apart, or drafted.

    `change` makes other parameters of the model's own.
    """
    if way == "experts":
        params, bits = change(drawn_params()), np.full((SPARSE, E), 8)
        write_tiny_bundle(path, cfg=CFG, params=params, expert_bits=bits)
    else:
        weights = "int8" if way in ("int8", "drafted") else "f32"
        write_tiny_bundle(path, weights, params=change(tiny_params(TINY)))
    if way in ("experts", "streamed"):
        whole = Engine.open(path, options=options, warm_up=False)
        memory_bytes = expert_budget(whole, 4) if way == "experts" else budget(whole, 0.7)
        options = dataclasses.replace(options, memory_bytes=memory_bytes)
        whole.close()
    speculation = SpeculationOptions(drafter="ngram", pausing=False) if way == "drafted" else None
    return Engine.open(path, options=options, speculation=speculation, **more)
