"""Trains a tiny LM: first the score head on kept words, then the decision head on self-induced labels.

ELMS (arXiv 2409.09071, section 3.3), with the score head's data and loss from LLMLingua-2 (arXiv
2403.12968, section 3.3). The layers that both heads share are trained with the score head and frozen for
the decision head, so that training decisions changes no score. Training starts from scratch, or from a
trained MobileBERT.

A run's folder has `recipe.json`, a folder for each head (`score/`, `decide/`) with `checkpoints/` and
`metrics.jsonl`, the elastic model's answers in `answers.npz` (until complete, by shards in `answers/`), and
at the end `summary.json`. Calling `train_tiny_lm` again on the same folder resumes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress as ProgressBar

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError
from jaxllm.tasks.questions import Question
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.training.elastic.tiny_lm.batches import (
    TOLD_SLOS,
    DecisionRows,
    ScoreRows,
    joined,
    score_rows,
)
from jaxllm.training.elastic.tiny_lm.questions import kept_answers, kept_support
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.scores import (
    answer_metrics,
    decision_metrics,
    decisions,
    keep_metrics,
    keep_scores,
)
from jaxllm.training.elastic.tiny_lm.self_labels import Answers, ElasticModel, answer, lightest
from jaxllm.training.elastic.tiny_lm.sources import TinyLmSources
from jaxllm.training.elastic.tiny_lm.start import decide_job, score_job
from jaxllm.training.elastic.tiny_lm.word_labels import question_score_rows, token_support
from jaxllm.training.loop.fitting import fit
from jaxllm.training.loop.monitoring import Monitoring
from jaxllm.training.loop.parallel import MeshShape, gathered, make_mesh
from jaxllm.training.loop.run_files import claimed, write_json
from jaxllm.training.loop.trainer import Batch, Job, Trainer
from jaxllm.training.settings import TrainSettings


def train_tiny_lm(
    sources: TinyLmSources,
    model: ElasticModel,
    run_dir: Path,
    *,
    name: str,
    mesh_shape: MeshShape | None = None,
    tensorboard: bool = False,
    console: Console | None = None,
) -> TinyLm:
    """Trains a tiny LM for an elastic model, or resumes the run in `run_dir`.

    Args:
      sources: the recipe, with the files that it names.
      model: elastic model with all of the recipe's levels.
      run_dir: folder of the run, created if missing.
      name: name of the model; a run cannot be resumed with another.
      mesh_shape: devices; all of them along `data` by default.
      tensorboard: whether to write TensorBoard's events, too.
      console: console of the progress; the terminal's error stream by default.

    Returns:
      The tiny LM of both heads' best checkpoints.

    Raises:
      ConfigError: the model lacks a level, or `run_dir` belongs to another run.
    """
    console, run_dir = console or Console(stderr=True), Path(run_dir)
    recipe, start = sources.recipe, sources.start
    questions, sides = sources.questions.all, sources.questions.held_out
    if missing := sorted(set(recipe.levels) - set(model.ladder.levels)):
        raise ConfigError(f"the recipe chooses between levels of which the model lacks {missing}")
    reader = start.reader(recipe.score.row_tokens)
    with claimed(run_dir, recipe, model=name, **sources.identity):
        told = recipe.instructions, recipe.score.seed
        # Rows by the kind of their labels, first to train on, then held out.
        labelled = [
            [score_rows([each[side] for each in sources.texts], model.tokenizer, reader, *told)]
            for side in (False, True)
        ]
    run = _Run(run_dir, mesh_shape or MeshShape(), console, tensorboard)
    console.print(
        f"{sum(value.size for value in start.params.values()):,} parameters; "
        f"{sum(len(rows) for split in sources.texts for rows in split):,} shortened texts, "
        f"{len(questions):,} questions of {name}",
        soft_wrap=True,
    )

    names = [Path(path).stem for path in recipe.compressions]
    if sources.used.all:
        measured = functools.partial(run.token_support, model, sources.used.all)
        support = kept_support(run_dir / "used.npz", sources.used.all, measured)
        for side in (False, True):
            places = np.flatnonzero(sources.used.held_out == side).tolist()
            rows = question_score_rows(
                [sources.used.all[place] for place in places],
                [support[place] for place in places],
                reader,
                source=len(names),
                weight=recipe.used_weight,
            )
            labelled[side].append(rows)
        names.append("used")
    learnt, *held_out = (
        ScoreRows(rows, start.mark_ids, recipe.score.batch, recipe.score.seed)
        for rows in (joined(*labelled[False]), joined(*labelled[True]), *labelled[True])
    )
    job = score_job(start, recipe.score)
    trained, summary = run.head("score", job, recipe.score, learnt.batch_at, held_out[0].held_out, names)
    for name, rows in zip(("shortened", "used"), held_out[1:], strict=False):
        summary[name] = keep_metrics(start.cfg, trained, rows.held_out())

    scores = keep_scores(start.cfg, trained, reader, questions)
    choices = {"levels": recipe.levels, "prompt_ratios": recipe.prompt_ratios}
    ask = functools.partial(answer, model, **choices)
    answers = kept_answers(run_dir / "answers.npz", questions, scores, ask, run.answered)

    asked, held_out = (
        decision_rows(recipe, answers, questions, sides == side, reader, slos)
        for side, slos in ((False, TOLD_SLOS), (True, SLOS))
    )
    job = decide_job(start, trained, recipe.decide)
    best, decided_on = run.head(
        "decide", job, recipe.decide, asked.batch_at, held_out.held_out, list(map(str, SLOS))
    )
    params = {**trained, **best}
    chosen, own = (
        decisions(start.cfg, params, held_out),
        Answers(answers.correct[sides], answers.shares[sides]),
    )
    decided_on |= decision_metrics(chosen, held_out.labels, SLOS)
    decided_on["answered_right"] = answer_metrics(own, chosen, SLOS, recipe.levels, recipe.prompt_ratios)
    right = answers.correct.mean(0).round(4)
    summary = {
        "parameters": sum(value.size for value in params.values()),
        "score": summary,
        "answers": {
            "questions": len(questions),
            "right_by_level": dict(zip(map(str, recipe.levels), right[:, -1].tolist(), strict=True)),
            "right_by_prompt_ratio": dict(
                zip(map(str, recipe.prompt_ratios), right[-1].tolist(), strict=True)
            ),
        },
        "decide": decided_on,
    }
    write_json(run_dir / "summary.json", summary)
    console.print_json(data=summary)
    return TinyLm(
        cfg=start.cfg, params=params, mark_ids=start.mark_ids, row_tokens=reader.row_tokens,
        tokenizer=start.own, **choices,
    )  # fmt: skip


def decision_rows(
    recipe: TinyLmRecipe,
    answers: Answers,
    questions: Sequence[Question],
    chosen: np.ndarray,
    reader: TinyReader,
    slos: Sequence[Slo],
) -> DecisionRows:
    """The rows of the chosen questions `[N]` bool, with their labels under some objectives."""
    labels = lightest(
        answers.correct[chosen], slos, recipe.levels, recipe.prompt_ratios, answers.shares[chosen]
    )
    rows = [reader.rows(questions[each].prompt) for each in np.flatnonzero(chosen).tolist()]
    return DecisionRows(rows, labels, tuple(slos), reader.mark_ids, recipe.decide.batch, recipe.decide.seed)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The training of either head in a run's folder."""

    folder: Path
    mesh_shape: MeshShape
    console: Console
    tensorboard: bool

    def head(
        self,
        name: str,
        job: Job,
        settings: TrainSettings,
        batch_at: Callable[[int], Batch],
        held_out: Callable[[], Iterable[Batch]],
        sources: Sequence[str],
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Trains a head, or resumes: its best parameters, and their step and loss."""
        mesh: Mesh = make_mesh(self.mesh_shape, settings.batch // settings.accumulate)
        trainer = Trainer(job, settings, mesh)
        self.console.print(f"{name}: {settings.steps:,} steps of {settings.batch} rows", soft_wrap=True)
        monitoring = Monitoring(console=self.console, tensorboard=self.tensorboard)
        best = fit(trainer, batch_at, held_out, self.folder / name, sources, monitoring)
        return gathered(best.params), {"best_step": best.step, "held_out_loss": best.loss}

    def token_support(self, model: ElasticModel, questions: Sequence[Question]) -> list[np.ndarray]:
        with ProgressBar(console=self.console, transient=True) as bar:
            task = bar.add_task("words used", total=len(questions))
            return token_support(
                model,
                questions,
                on_measured=lambda done, total: bar.update(task, completed=done, total=total),
            )

    def answered(self, done: int, total: int) -> None:
        self.console.print(f"all levels have answered {done:,} of {total:,} questions", highlight=False)
