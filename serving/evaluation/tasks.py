"""Runs a model on tasks: scores options and continuations, many questions a dispatch, each fed once for all
of its options; generates free answers greedily; writes results.
"""

import dataclasses
import functools
import json
import string
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.evaluation.intervals import Interval, mean_interval
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.steps.branching import Branching, BranchScores, cut, row_lengths, score_pieces
from jaxllm.tasks import TASKS, Task, find_task
from jaxllm.tasks.example import DataMissing, TaskExample, pseudo_random
from jaxllm.tasks.questions import branching
from jaxllm.tasks.rouge import require_rouge, rouge
from jaxllm.text.prompts import end_of_turn_id, prompt_ids


def score_options(
    engine: Engine,
    questions: Sequence[Branching],
    *,
    progress: Progress | None = None,
    stage: str = "score",
) -> list[np.ndarray]:
    """Log-probability (natural, summed over tokens) of every branch of every question, for each question
    `[branches]` float64 (see `score_branches_of`)."""
    return [each.sums for each in score_branches_of(engine, questions, progress=progress, stage=stage)]


def score_branches_of(
    engine: Engine,
    questions: Sequence[Branching],
    *,
    progress: Progress | None = None,
    stage: str = "score",
) -> list[BranchScores]:
    """Scores every branch of every question.

    Keys and values stay within a dispatch, in the activations' dtype; an engine's cache may be narrower. An
    engine with integer prefill prefills each trunk in integers, and feeds its branches after it in the cache.

    Args:
      engine: the model, with its weights at the width that it serves.
      questions: any number, in any order.
      progress: callback for (`stage`, tokens scored, tokens in all).
      stage: name of the progress.

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
) -> list[BranchScores]:
    """`score_branches_of` with trunks prefilled as prompts are."""
    runner = scorer.runner
    context = runner.options.context_tokens
    scorer.prepare_ends(runner.cache_for(context), progress)
    for question in questions:
        runner.time_prompt(len(question.trunk), context - len(question.trunk))
    found, done, total = [], 0, sum(question.fed_tokens for question in questions)
    for question in questions:
        logits, cache = prefill_prompt(runner, runner.start(context), question.trunk, 0)
        row, sums, greedy = np.asarray(logits, np.float64)[0], [], []
        normalizer = np.logaddexp.reduce(row)
        for branch in question.branches:
            score, likeliest = row[branch[0]] - normalizer, bool(row[branch[0]] >= row.max())
            if len(branch) > 1:
                more, best, cache = scorer.score_end(branch[:-1], branch[1:], cache)
                score += more.sum(dtype=np.float64)
                likeliest = likeliest and np.array_equal(best, branch[1:])
            sums.append(score)
            greedy.append(likeliest)
        found.append(BranchScores(np.array(sums), np.array(greedy)))
        done += question.fed_tokens
        if progress is not None:
            progress(stage, done, total)
    return found


Prediction = dict[str, Any]
ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of a model on one task.

    Attributes:
      task: name of the task.
      level: the level that answered, in percent.
      scores: means over the questions, in [0, 1], the main one first: `accuracy` (and, if options differ
        much in length, `accuracy_per_byte`, by log-probability per byte of the option), `exact_match`, or
        `rouge1`, `rouge2` and `rougeL` (F1, with the best of several references). Empty if no question was
        asked.
      intervals: the 95 % interval of each score (see `jaxllm.serving.evaluation.intervals`).
      examples: number of questions asked.
      skipped: number of questions that do not fit the context with their answer.
      chance: accuracy of guessing; None for free answers.
      majority: share of the most frequent right answer; None for free answers.
      tokens: tokens that the model was fed or decoded.
      seconds: time, without the time to read files and compile buckets.
    """

    task: str
    level: int
    scores: dict[str, float]
    intervals: dict[str, Interval]
    examples: int
    skipped: int
    chance: float | None
    majority: float | None
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """The validation questions of tasks.

    Attributes:
      examples: questions by task.
      missing: tasks of a requested group without files.
    """

    examples: dict[str, list[TaskExample]]
    missing: tuple[str, ...] = ()


def read_questions(names: Sequence[str], data: Path, limit: int = 0) -> Questions:
    """Reads the validation questions of tasks.

    Args:
      names: tasks; `all` for those with files in `data`.
      data: the folder of all data.
      limit: maximum number of questions per task, in an order given by their contents, so that they are a
        fair sample; 0 for all, in the files' order.

    Raises:
      ConfigError: a task is unknown, its file is missing or malformed, or it has no question.
    """
    examples, missing = {}, []
    for name in TASKS if ALL in names else ():
        try:
            examples[name] = _read(name, data, limit)
        except DataMissing:
            missing.append(name)
    if ALL in names and not examples:
        raise ConfigError(
            f"{data} has files of no task; give the folder that holds tasks/, with a task's files, such as "
            "tasks/sst2/valid.jsonl"
        )
    examples |= {name: _read(name, data, limit) for name in dict.fromkeys(names) if name != ALL}
    return Questions(examples=examples, missing=tuple(missing))


def run_task(
    engine: Engine, task: Task, examples: Sequence[TaskExample], progress: Progress | None = None
) -> tuple[TaskResult, list[Prediction]]:
    """Runs a model on the questions of a task, and scores its answers.

    Raises:
      ConfigError: Rouge is required and not installed.
    """
    run = {"accuracy": _choose, "continuation": _continue}.get(task.score, _write)
    fitting, predictions, tokens, seconds = run(engine, task, examples, progress)
    measures = [name for name in predictions[0] if name in _MEASURES] if predictions else []
    with_options = task.score == "accuracy" and bool(fitting)
    values = {name: np.array([each[name] for each in predictions]) for name in measures}
    answers = Counter(example.answer for example in fitting)
    result = TaskResult(
        task=task.name,
        level=engine.level,
        scores={name: float(np.mean(each)) for name, each in values.items()},
        intervals={name: mean_interval(each) for name, each in values.items()},
        examples=len(fitting),
        skipped=len(examples) - len(fitting),
        chance=float(np.mean([1 / len(example.options) for example in fitting])) if with_options else None,
        majority=max(answers.values()) / len(fitting) if with_options else None,
        tokens=tokens,
        seconds=round(seconds, 3),
    )
    return result, predictions


def is_right(example: TaskExample, text: str) -> bool:
    """Whether a generated answer is right: the same text, or for a passage's end the same first word."""
    if example.form == "text":
        return _first_word(text) == _first_word(example.answer)
    return text.strip() == example.answer.strip()


# Scores of a prediction; 1 is a right answer.
_MEASURES = ("accuracy", "accuracy_per_byte", "exact_match", "rouge1", "rouge2", "rougeL")
_Run = tuple[list[TaskExample], list[Prediction], int, float]


def _choose(engine: Engine, task: Task, examples: Sequence[TaskExample], progress: Progress | None) -> _Run:
    """Chooses the most likely option; of equally likely ones the first."""
    fitting, scores, tokens, seconds = _scored(engine, task, examples, progress)
    predictions = []
    for example, found in zip(fitting, scores, strict=True):
        each = found.sums
        chosen = example.options[int(np.argmax(each))]
        prediction = _asked(task, example) | {
            "options": list(example.options),
            "log_probabilities": [round(float(score), 5) for score in each],
            "prediction": chosen,
            "accuracy": float(chosen == example.answer),
        }
        if task.per_byte:
            sizes = np.array([len(option.strip().encode()) for option in example.options])
            chosen = example.options[int(np.argmax(each / np.maximum(sizes, 1)))]
            prediction["prediction_per_byte"] = chosen
            prediction["accuracy_per_byte"] = float(chosen == example.answer)
        predictions.append(prediction)
    return fitting, predictions, tokens, seconds


def _continue(engine: Engine, task: Task, examples: Sequence[TaskExample], progress: Progress | None) -> _Run:
    """Judges whether the model would continue with the right answer, each of its tokens the likeliest."""
    alone = [dataclasses.replace(example, options=(example.answer,)) for example in examples]
    fitting, scores, tokens, seconds = _scored(engine, task, alone, progress)
    predictions = [
        _asked(task, example)
        | {"log_probability": round(float(each.sums[0]), 5), "accuracy": float(each.greedy[0])}
        for example, each in zip(fitting, scores, strict=True)
    ]
    return fitting, predictions, tokens, seconds


def _scored(
    engine: Engine, task: Task, examples: Sequence[TaskExample], progress: Progress | None
) -> tuple[list[TaskExample], list[BranchScores], int, float]:
    """The examples that fit the context, the scores of their options, tokens and seconds."""
    built_ms = engine.runner.buckets.build_ms
    began = time.perf_counter()
    now = datetime.now()
    end = end_of_turn_id(engine.tokenizer, now=now)
    questions = [branching(engine.tokenizer, example, end, now=now) for example in examples]
    context = engine.options.context_tokens
    kept = [pair for pair in zip(examples, questions, strict=True) if pair[1].longest_tokens <= context]
    fitting, questions = [example for example, _ in kept], [question for _, question in kept]
    scores = score_branches_of(engine, questions, progress=progress, stage=task.name)
    seconds = time.perf_counter() - began - (engine.runner.buckets.build_ms - built_ms) / 1000
    return fitting, scores, sum(question.fed_tokens for question in questions), seconds


def _write(engine: Engine, task: Task, examples: Sequence[TaskExample], progress: Progress | None) -> _Run:
    """Writes answers greedily, until the model ends or they are as long as the task allows."""
    if task.score == "rouge":
        require_rouge()
    prompts = [(example, prompt_ids(engine.tokenizer, example, now=datetime.now())) for example in examples]
    room = engine.options.context_tokens - task.answer_tokens
    prompts = [(example, ids) for example, ids in prompts if len(ids) <= room]
    engine.runner.fill(engine.runner.buckets_for(), progress)
    config = GenerationConfig(max_tokens=task.answer_tokens)
    predictions, tokens = [], 0
    began = time.perf_counter()
    for example, ids in prompts:
        answer = engine.generate(ids, config)
        tokens += len(ids) + len(answer.tokens)
        if task.score == "rouge":
            judged = rouge(example.references or (example.answer,), answer.text)
        else:
            judged = {"exact_match": float(is_right(example, answer.text))}
        predictions.append(_asked(task, example) | {"prediction": answer.text} | judged)
        if progress is not None:
            progress(task.name, len(predictions), len(prompts))
    return [example for example, _ in prompts], predictions, tokens, time.perf_counter() - began


def _read(name: str, data: Path, limit: int) -> list[TaskExample]:
    examples = list(find_task(name).read(data, "valid"))
    if not examples:
        raise ConfigError(f"{data} has no validation question of the task {name!r}")
    if not limit:
        return examples
    return sorted(examples, key=lambda each: pseudo_random(f"{each.user}\0{each.answer}"))[:limit]


def _asked(task: Task, example: TaskExample) -> Prediction:
    asked = {"task": task.name, "question": example.user, "answer": example.answer}
    return asked | ({"references": list(example.references)} if len(example.references) > 1 else {})


def _first_word(text: str) -> str:
    words = text.split()
    return words[0].strip(string.punctuation + "“”‘’") if words else ""


def as_json(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """Results as plain dicts, with scores next to the other fields."""
    facts = []
    for result in results:
        fields = dataclasses.asdict(result)
        facts.append({"task": fields.pop("task"), **fields.pop("scores"), **fields})
    return facts


def check_predictions(path: Path) -> None:
    """Checks that predictions can be written to a path, before the evaluation.

    Raises:
      ConfigError: the folder is missing, or `path` is a folder.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--predictions {path}: name a file in a folder that is there")


def write_predictions(path: Path, predictions: Iterable[Prediction]) -> None:
    """Writes one JSON object a line, all or nothing."""
    with atomic_file(path) as file:
        for prediction in predictions:
            file.write(json.dumps(prediction, ensure_ascii=False).encode() + b"\n")
