"""Answers of several systems to the same prompts, and their figures: times per token, likeness, intervals."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.tasks.rouge import rouge
from serving.answer import Answer
from serving.engine import Engine
from serving.host.progress import Progress
from serving.request import GenerationConfig

# Of one system, by task.
Answers = dict[str, list[Answer]]
# Of one system, for each task: milliseconds after the first token of each answer, and tokens after it.
Spent = Sequence[tuple[Sequence[float], Sequence[int]]]
_DRAWS = 2000


def ask(
    engines: Mapping[str, Engine],
    prompts: Mapping[str, Sequence[list[int]]],
    config: GenerationConfig,
    label: str,
    progress: Progress | None,
) -> dict[str, Answers]:
    """Answers of every system, all systems at one prompt before the next one.

    Args:
      engines: by system.
      prompts: token ids by task.
      config: of each answer.
      label: for `progress`, which is called with answers done and answers in all.
      progress: see above.
    """
    found: dict[str, Answers] = {name: {task: [] for task in prompts} for name in engines}
    done, total = 0, len(engines) * sum(map(len, prompts.values()))
    for number, (task, prompt) in enumerate((task, each) for task, all_ in prompts.items() for each in all_):
        # No system always runs behind the same one.
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            found[name][task].append(engines[name].generate(prompt, config))
            done += 1
            if progress is not None:
                progress(label, done, total)
    return found


def token_ms(spent: Spent) -> float:
    """Time per token after the first: over all answers of a task, then the mean over tasks.

    Raises:
      ConfigError: no answer has a second token.
    """
    means = [sum(times) / sum(tokens) for times, tokens in spent if sum(tokens)]
    if not means:
        raise ConfigError("no answer had more than one token; give more prompts, or let answers be longer")
    return float(np.mean(means))


def ratio_interval(ours: Spent, theirs: Spent, *, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of how many times ours is as fast, over prompts of each task drawn with replacement,
    the same ones for both systems (paired bootstrap); with one prompt of each task it is a point.

    Args:
      ours: of answers.
      theirs: of another system's answers to the same prompts.
      seed: of the draws.
    """
    draw = np.random.default_rng(seed)
    sums = [np.zeros(_DRAWS), np.zeros(_DRAWS)]
    for pair in zip(ours, theirs, strict=True):
        count = len(pair[0][0])
        if not count:
            continue
        drawn = draw.integers(0, count, (_DRAWS, count))
        tokens = [np.asarray(each)[drawn].sum(1) for _, each in pair]
        for place, (times, _) in enumerate(pair):
            per_token = np.asarray(times)[drawn].sum(1) / np.maximum(tokens[place], 1)
            # A task of which a draw has no token on either side counts for neither.
            sums[place] += np.where((tokens[0] > 0) & (tokens[1] > 0), per_token, 0.0)
    low, high = np.percentile(sums[1] / np.maximum(sums[0], 1e-9), (2.5, 97.5))
    return float(low), float(high)


def agreement(ours: Answers, theirs: Answers) -> float:
    """Share of tokens that are the same at the same place."""
    pairs = [(a.tokens, b.tokens) for task in theirs for a, b in zip(ours[task], theirs[task], strict=True)]
    same = sum(sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)
    return same / max(1, sum(len(b) for _, b in pairs))


def rouge_l(ours: Answers, target: Answers) -> list[float]:
    """Rouge-L (F1) of each answer, the target's own being the right one; 1 where both are the same text.

    LLMCad measures accuracy so (section 4.1).

    Raises:
      ConfigError: `rouge-score` is not installed.
    """
    pairs = [(a.text, b.text) for task in target for a, b in zip(ours[task], target[task], strict=True)]
    return [1.0 if a == b else rouge([b], a)["rougeL"] for a, b in pairs]


def mean_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of means over values drawn with replacement."""
    found = np.asarray(values)
    drawn = np.random.default_rng(seed).integers(0, len(found), (_DRAWS, len(found)))
    low, high = np.percentile(found[drawn].mean(1), (2.5, 97.5))
    return float(low), float(high)


def spent(answers: Answers) -> Spent:
    """What the answers of each task took."""
    return [
        ([one.timings.total_ms - one.timings.ttft_ms for one in each], [len(one.tokens) - 1 for one in each])
        for each in answers.values()
    ]
