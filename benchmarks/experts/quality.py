"""Measures what a loss of experts costs: perplexity and agreement, as tokens are decoded from storage."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.speculative.tree import line_tree
from serving.engine import Engine
from serving.runners.runner import prefill_prompt
from serving.speculation.options import TreeShape

PROMPT, NODES = 16, 64
TREES = TreeShape(nodes=(NODES,), room=NODES)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predictions of the tokens of a text.

    Attributes:
      perplexity: of the tokens.
      likeliest: `[T]` int, what is predicted.
    """

    perplexity: float
    likeliest: np.ndarray


def predicted(engine: Engine, windows: Sequence[Sequence[int]]) -> Predicted:
    """Predicts text token by token with a mixture whose experts are streamed.

    The tokens of a window are the nodes of a tree of one branch, which gives each to the bit what decoding
    gives it.

    Args:
      engine: with the tree shapes `TREES`.
      windows: of `PROMPT` + `NODES` + 1 tokens.
    """
    # Layer by layer, for experts are streamed.
    runner: Any = engine.runner
    runner.fill([*runner.request_buckets(PROMPT, NODES), *runner.tree_buckets(NODES)])
    loss, likeliest = 0.0, list[np.ndarray]()
    for window in windows:
        start = runner.start(runner.cache_for(PROMPT + NODES))
        _, cache = prefill_prompt(runner, start, list(window[:PROMPT]), 0)
        logits, _ = runner.tree_logits(line_tree(window[PROMPT:-1]), cache)
        targets = np.asarray(window[PROMPT + 1 :])
        logs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
        loss -= float(logs[np.arange(NODES), targets].sum(dtype=np.float64))
        likeliest.append(logs.argmax(-1))
    return Predicted(float(np.exp(loss / (NODES * len(windows)))), np.concatenate(likeliest))
