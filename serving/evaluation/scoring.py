"""Log-probabilities of possible answers: many questions a dispatch, each read once for all of its answers."""

from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ContextOverflow
from serving.buckets import Progress
from serving.engine import Engine
from serving.packing import Branching, cut, pack, row_lengths


def score_options(
    engine: Engine,
    questions: Sequence[Branching],
    *,
    progress: Progress | None = None,
    stage: str = "score",
) -> list[np.ndarray]:
    """Log-probability (natural, summed over tokens) of every branch of every question.

    Keys and values stay within a dispatch, in the activations' width; an engine's cache may be narrower.

    Args:
      engine: the model, with its weights at the width that it serves.
      questions: any number, in any order.
      progress: called with (`stage`, tokens scored, tokens in all).
      stage: what progress is told.

    Returns:
      For each question `[branches]` float64.

    Raises:
      ContextOverflow: a trunk with a branch is longer than the context.
    """
    context = engine.options.context_tokens
    longest = max((question.longest_tokens for question in questions), default=0)
    if longest > context:
        raise ContextOverflow(f"a question has {longest} tokens with its answer, the context holds {context}")
    pieces = cut(questions, row_lengths(context))
    table = engine.table
    buckets = {length: table.branches_bucket(length) for length in pieces}
    table.fill(buckets.values(), progress)
    counts = [len(question.branches) for question in questions]
    sums = np.zeros(sum(counts))
    done, total = 0, sum(len(branch) for question in questions for branch in question.branches)
    for length, group in pieces.items():
        for packed in pack(group, buckets[length].rows, length):
            np.add.at(sums, packed.owners[: packed.count], table.score_branches(packed).astype(np.float64))
            done += packed.count
            if progress is not None:
                progress(stage, done, total)
    return np.split(sums, np.cumsum(counts)[:-1]) if counts else []
