"""Asks the models of each system every question, and looks up their times."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.elastic.baselines import Size
from benchmarks.elastic.policies import Variants
from jaxllm.config import WHOLE
from jaxllm.steps.branching import Branching
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question, shorten
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from serving.engine import Engine
from serving.evaluation.scoring import score_options
from serving.host.progress import Progress
from serving.planning.profile import DeviceProfile
from serving.planning.proposer import Proposer


def right_answers(
    engine: Engine,
    questions: Sequence[Question],
    prompts: Sequence[Branching],
    progress: Progress | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Which questions a model answers right, by the likeliest of the options.

    Args:
      engine: the model.
      questions: N, what is right.
      prompts: the questions as this model reads them.
      progress: of scoring.

    Returns:
      `[N]` bool, whether the answer is right; `[N]` bool, whether the context holds the question. One that it
      does not hold is not right.
    """
    fits = np.array([each.longest_tokens <= engine.options.context_tokens for each in prompts])
    asked = [each for each, fit in zip(prompts, fits, strict=True) if fit]
    scores = iter(score_options(engine, asked, progress=progress) if asked else ())
    right = [fit and each.is_right(next(scores)) for each, fit in zip(questions, fits, strict=True)]
    return np.array(right, bool), fits


def variant_keys(levels: Sequence[int], ratios: Sequence[float]) -> list[tuple[int, float]]:
    """Level and ratio of our variants, in order; the whole model with the whole prompt is last."""
    return list(itertools.product(levels, ratios))


def our_variants(
    engine: Engine,
    profile: DeviceProfile,
    questions: Sequence[Question],
    proposer: Proposer,
    ratios: Sequence[float],
    planning_ms: np.ndarray,
    progress: Progress | None = None,
) -> Variants:
    """Our variants: every level with the prompt at every ratio; times include planning.

    Args:
      engine: serves the levels.
      profile: their times.
      questions: N.
      proposer: whose scores shorten prompts.
      ratios: ascending, the last one 1.
      planning_ms: `[N]`, time of the plan for each question.
      progress: of scoring.
    """
    levels = engine.levels
    made = [shorten(engine.tokenizer, each, proposer.scores(each.prompt), ratios) for each in questions]
    lengths = np.array([len(each.prompt.ids) for each in questions])
    tokens = lengths[:, None] * np.array([shares for _, shares in made])
    ttft, tpot, right = [], [], []
    for level, ratio in variant_keys(levels, ratios):
        column = ratios.index(ratio)
        answers, fits = right_answers(
            engine.at(level), questions, [prompts[column] for prompts, _ in made], progress
        )
        counts = np.maximum(1, np.rint(tokens[:, column])).astype(int)
        # The whole model with the whole prompt needs no plan.
        plan_ms = 0.0 if (level, ratio) == (WHOLE, 1) else planning_ms
        times = np.array([profile.ttft(level, count) for count in counts]) + plan_ms
        right.append(answers)
        ttft.append(np.where(fits, times, np.inf))
        tpot.append([profile.tpot(level, count) for count in counts])
    return Variants(
        names=tuple(
            f"{level} % of the model, {ratio:.0%} of the prompt"
            for level, ratio in variant_keys(levels, ratios)
        ),
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.zeros(len(right)),
    )


def size_variants(
    sizes: Sequence[Size],
    profiles: Mapping[int, DeviceProfile],
    questions: Sequence[Question],
    progress: Progress | None = None,
) -> Variants:
    """A variant for each of several models, ascending, with the whole prompt by the model's own tokenizer.

    Args:
      sizes: the models.
      profiles: of their engines, by `id`.
      questions: N.
      progress: of scoring.
    """
    read: dict[int, tuple[list[Branching], list[int]]] = {}
    ttft, tpot, right = [], [], []
    for size in sizes:
        tokenizer, profile = size.engine.tokenizer, profiles[id(size.engine)]
        if id(tokenizer) not in read:
            read[id(tokenizer)] = _read(tokenizer, questions)
        prompts, lengths = read[id(tokenizer)]
        answers, fits = right_answers(size.engine.at(size.level), questions, prompts, progress)
        right.append(answers)
        ttft.append(np.where(fits, [profile.ttft(size.level, each) for each in lengths], np.inf))
        tpot.append([profile.tpot(size.level, each) for each in lengths])
    return Variants(
        names=tuple(size.name for size in sizes),
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.array([size.change_ms for size in sizes]),
    )


def _read(tokenizer: Tokenizer, questions: Sequence[Question]) -> tuple[list[Branching], list[int]]:
    """Questions as a tokenizer's model reads them, and the tokens of their prompts."""
    prompts = [branching(tokenizer, each.example) for each in questions]
    return prompts, [len(prompt_tokens(tokenizer, each.example).ids) for each in questions]
