"""Scores the options of questions: many questions a dispatch, each fed once for all of its options."""

import functools
from collections.abc import Sequence

import numpy as np

from jaxllm.errors import ContextOverflow
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching, cut, row_lengths, score_pieces


def score_options(
    engine: Engine,
    questions: Sequence[Branching],
    *,
    progress: Progress | None = None,
    stage: str = "score",
) -> list[np.ndarray]:
    """Log-probability (natural, summed over tokens) of every branch of every question.

    Keys and values stay within a dispatch, in the activations' dtype; an engine's cache may be narrower. An
    engine with integer prefill prefills each trunk in integers, and feeds its branches after it in the cache.

    Args:
      engine: the model, with its weights at the width that it serves.
      questions: any number, in any order.
      progress: callback for (`stage`, tokens scored, tokens in all).
      stage: name of the progress.

    Returns:
      For each question `[branches]` float64.

    Raises:
      ContextOverflow: a trunk with a branch is longer than the context.
    """
    context = engine.options.context_tokens
    longest = max((question.longest_tokens for question in questions), default=0)
    if longest > context:
        raise ContextOverflow(
            f"a question has {longest} tokens with its answer, the context has {context}; leave it out, or "
            "ask for a longer --context"
        )
    scorer: Scorer = Scorer(engine.runner)
    if scorer.runner.int8 is not None:
        return _behind_prompts(scorer, questions, progress, stage)
    pieces = cut(questions, row_lengths(context))
    rows = scorer.prepare_branches(pieces, progress)
    on_scored = None if progress is None else functools.partial(progress, stage)
    return score_pieces(questions, pieces, rows, scorer.score_branches, on_scored)


def _behind_prompts(
    scorer: Scorer, questions: Sequence[Branching], progress: Progress | None, stage: str
) -> list[np.ndarray]:
    """`score_options` with trunks prefilled as prompts are."""
    runner = scorer.runner
    context = runner.options.context_tokens
    scorer.prepare_ends(runner.cache_for(context), progress)
    for question in questions:
        runner.time_prompt(len(question.trunk), context - len(question.trunk))
    found, done, total = [], 0, sum(question.fed_tokens for question in questions)
    for question in questions:
        logits, cache = prefill_prompt(runner, runner.start(context), question.trunk, 0)
        row, sums = np.asarray(logits, np.float64)[0], []
        normalizer = np.logaddexp.reduce(row)
        for branch in question.branches:
            score = row[branch[0]] - normalizer
            if len(branch) > 1:
                more, cache = scorer.score_end(branch[:-1], branch[1:], cache)
                score += more.sum(dtype=np.float64)
            sums.append(score)
        found.append(np.array(sums))
        done += question.fed_tokens
        if progress is not None:
            progress(stage, done, total)
    return found
