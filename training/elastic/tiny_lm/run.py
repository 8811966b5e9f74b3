"""Trains a tiny LM: first the score head on kept words, then the decision head on self-induced labels.

ELMS (arXiv 2409.09071, section 3.3), with the score head's data and loss from LLMLingua-2 (arXiv
2403.12968, section 3.3). The layers that both heads share are trained with the score head and frozen for
the decision head, so that training decisions changes no score. Training starts from scratch, or from a
trained MobileBERT.

A run's folder has `recipe.json`, a folder for each head (`score/`, `decide/`) with `checkpoints/` and
`metrics.jsonl`, the elastic model's answers in `answers/`, and at the end `summary.json`. Calling
`train_tiny_lm` again on the same folder resumes. All inputs are read before it begins, so that mistakes show
at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.checkpoints.encoder_folders import read_encoder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.elastic.compression import marked
from jaxllm.elastic.slo import SLOS, Slo, marks
from jaxllm.errors import ConfigError
from jaxllm.models import tiny_lm as tlm
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.tasks.questions import Question
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.training.data.documents import documents_digest, text_document
from jaxllm.training.elastic.tiny_lm.labels import (
    Answers,
    ElasticModel,
    Questions,
    allowed_choices,
    answer,
    kept_answers,
    kept_support,
    lightest,
    question_score_rows,
    questions_digest,
    read_questions,
    token_support,
)
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.rows import (
    MARKED_SLOS,
    DecisionBatch,
    DecisionRows,
    KeptWords,
    ScoreBatch,
    ScoreRows,
    align,
    joined,
    read_compressions,
    score_rows,
    split_rows,
    well_aligned,
)
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.fitting import fit
from jaxllm.training.loop.parallel import gathered
from jaxllm.training.loop.run_files import Run, claimed, progress_bar
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, eq=False)
class Start:
    """Tiny LM before its training.

    Attributes:
      cfg: its config, with a vocabulary that includes the marks.
      params: float32 parameters.
      mark_ids: token of each of `marks()`.
      own: its own tokenizer; None if it shares the large model's.
    """

    cfg: TlmConfig
    params: Params
    mark_ids: tuple[int, ...]
    own: TokenizerFiles | None = None

    @classmethod
    def of(cls, recipe: TinyLmRecipe, tokenizer: Tokenizer, encoder: Path | None = None) -> "Start":
        """Makes random parameters, or uses a trained encoder under both heads.

        Marks are tokens that the tokenizer reserves for them, or new ones after its vocabulary; their
        embeddings are orthogonal.

        Args:
          tokenizer: tokenizer of the large model.
          encoder: MobileBERT folder with its tokenizer; None trains the recipe's encoder from scratch.

        Raises:
          ConfigError: there is no encoder to train, or its vocabulary or window is too small.
          CheckpointError: the folder cannot be read.
        """
        sizes = {
            "shared_layers": recipe.shared_layers,
            "levels": len(recipe.levels),
            "prompt_levels": len(recipe.prompt_ratios),
        }
        key, marks_key = jax.random.split(jax.random.key(recipe.score.seed))
        own = None
        if encoder is not None:
            own = read_tokenizer(encoder)
            encoder_cfg, trained = read_encoder(encoder)
            cfg = TlmConfig(encoder=encoder_cfg, **sizes)
            wide = {name: jnp.asarray(value, jnp.float32) for name, value in trained.items()}
            params: Any = tlm.tlm_from_encoder(wide, cfg, key)
        elif recipe.encoder is not None:
            # The model's vocabulary replaces the recipe's, which nothing was trained with.
            words = dataclasses.replace(recipe.encoder, vocab_size=tokenizer.vocab_size)
            cfg = TlmConfig(encoder=words, **sizes)
            params = tlm.init_tlm(cfg, key)
        else:
            raise ConfigError(
                "the recipe has no encoder: give it one, or the folder of a MobileBERT (--tiny-lm-encoder)"
            )
        reads = tokenizer if own is None else Tokenizer(own)
        window, rows = cfg.encoder.window_tokens, recipe.score.row_tokens
        if rows > window:
            raise ConfigError(f"row_tokens ({rows}) must be at most the encoder's window ({window})")
        vocab = cfg.encoder.vocab_size
        if reads.vocab_size > vocab:
            raise ConfigError(f"the tokenizer has {reads.vocab_size} tokens, the encoder only {vocab}")
        ids = _reserved(reads)
        if ids:
            params = tlm.separate_tokens(params, ids, marks_key)
        else:
            params, cfg = tlm.grow_vocabulary(params, cfg, len(marks()), marks_key)
            ids = tuple(range(vocab, vocab + len(marks())))
        return cls(cfg, params, ids, own)

    def reader(self, row_tokens: int) -> TinyReader:
        """Reader of prompts in rows of that length."""
        own = None if self.own is None else Tokenizer(self.own)
        return TinyReader(own, self.mark_ids, row_tokens)


def _reserved(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that a tokenizer reserves for marks; empty if it lacks one."""
    ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks()]
    whole = all(len(each) == 1 for each in ids) and len({each[0] for each in ids}) == len(ids)
    return tuple(each[0] for each in ids) if whole else ()


def score_job(start: Start, settings: TrainSettings) -> Job:
    """Returns the job that trains the score head and the layers that both heads share."""
    cfg, dtype = start.cfg, jnp.dtype(settings.computed_in)

    def losses(params: Params, frozen: Any, batch: ScoreBatch) -> tuple[jax.Array, jax.Array]:
        logits = tlm.score(params, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype)
        return optax.sigmoid_binary_cross_entropy(logits, batch.labels), jnp.zeros(())

    return Job(_without(start.params, "decide."), losses)


def decide_job(start: Start, trained: Mapping[str, Any], settings: TrainSettings) -> Job:
    """Returns the job that trains the decision head over `trained`, the parameters of a `score_job`."""
    cfg, dtype = start.cfg, jnp.dtype(settings.computed_in)
    own = {name: value for name, value in start.params.items() if name.startswith("decide.")}

    def losses(params: Params, frozen: Params, batch: DecisionBatch) -> tuple[jax.Array, jax.Array]:
        logits = tlm.decide(
            {**frozen, **params}, jnp.asarray(batch.tokens), jnp.asarray(batch.mask), cfg=cfg, dtype=dtype
        )
        entropy = optax.softmax_cross_entropy_with_integer_labels
        both = sum(entropy(each, batch.choices[:, place]) for place, each in enumerate(logits))
        return jnp.asarray(both)[:, None], jnp.zeros(())

    return Job(own, losses, _without(trained, "score."))


def _without(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not name.startswith(prefix)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TinyLmSources:
    """Inputs of a recipe, read for one large model.

    Attributes:
      start: the tiny LM before its training.
      texts: training and held-out rows, for each file of shorter versions.
      questions: questions of all tasks, to learn decisions from.
      used: questions of all tasks, to learn the words from that the elastic model uses.
      identity: names and digests of all inputs, to claim a run's folder with.
    """

    recipe: TinyLmRecipe
    start: Start
    texts: tuple[tuple[list[KeptWords], list[KeptWords]], ...]
    questions: Questions
    used: Questions
    identity: dict[str, str]

    @classmethod
    def read(
        cls,
        recipe: TinyLmRecipe,
        data: Path,
        tokenizer: Tokenizer,
        window_tokens: int,
        encoder: Path | None = None,
    ) -> "TinyLmSources":
        """Reads all inputs of a run.

        Args:
          data: folder of the recipe's files.
          tokenizer: tokenizer of the large model.
          window_tokens: window of the large model; longer questions are left out.
          encoder: MobileBERT folder to start from; None trains the recipe's encoder from scratch.

        Raises:
          ConfigError: a file is missing, malformed or too small, or the encoder is too small.
          CheckpointError: the encoder cannot be read.
        """
        rows = []
        for path in recipe.compressions:
            rows.append(well_aligned([align(*pair) for pair in read_compressions(data / path)]))
            if not rows[-1]:
                raise ConfigError(f"{data / path} holds no text with a shorter version")
        texts = tuple(split_rows(each, recipe.held_out_share) for each in rows)
        named = (f"{row.text}\0{row.kept.tobytes().hex()}" for each in rows for row in each)
        questions = read_questions(recipe, data, tokenizer, window_tokens)
        return cls(
            recipe=recipe,
            start=Start.of(recipe, tokenizer, encoder),
            texts=texts,
            questions=questions.first(recipe.questions),
            used=questions.first(recipe.used_questions),
            identity={
                "encoder": "" if encoder is None else Path(encoder).resolve().name,
                "texts": documents_digest(text_document(text).digest() for text in named),
                "questions": questions_digest(questions.all),
            },
        )


def train_tiny_lm(
    sources: TinyLmSources,
    model: ElasticModel,
    run: Run,
    *,
    name: str,
) -> TinyLm:
    """Trains a tiny LM for an elastic model, or resumes the run.

    Args:
      sources: the recipe, with the files that it names.
      model: elastic model with all of the recipe's levels.
      name: name of the model; a run cannot be resumed with another.

    Returns:
      The tiny LM of both heads' best checkpoints.

    Raises:
      ConfigError: the model lacks a level, or the folder belongs to another run.
    """
    console = run.own_console
    recipe, start = sources.recipe, sources.start
    questions, sides = sources.questions.all, sources.questions.held_out
    if missing := sorted(set(recipe.levels) - set(model.ladder.levels)):
        raise ConfigError(f"the recipe chooses between levels of which the model lacks {missing}")
    reader = start.reader(recipe.score.row_tokens)
    with claimed(run.folder, recipe, model=name, **sources.identity):
        options = recipe.instructions, recipe.score.seed
        # Rows by the kind of their labels, first to train on, then held out.
        labelled = [
            [score_rows([each[side] for each in sources.texts], model.tokenizer, reader, *options)]
            for side in (False, True)
        ]
    run.say(
        f"{sum(value.size for value in start.params.values()):,} parameters; "
        f"{sum(len(rows) for split in sources.texts for rows in split):,} shortened texts, "
        f"{len(questions):,} questions of {name}"
    )

    names = [Path(path).stem for path in recipe.compressions]
    if sources.used.all:
        with progress_bar(console, "words used") as measured:
            support = kept_support(
                run.folder / "used.npz",
                sources.used.all,
                lambda: token_support(model, sources.used.all, on_measured=measured),
            )
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

    def head(
        name: str, job: Job, settings: TrainSettings, train: Any, held_out: Any, sources: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Trains a head, or resumes: its best parameters, and their step and loss."""
        run.say(f"{name}: {settings.steps:,} steps of {settings.batch} rows")
        trainer = Trainer(job, settings, run.mesh(settings))
        best = fit(trainer, train.batch_at, held_out.held_out, run.stage(name), sources)
        return gathered(best.params), {"best_step": best.step, "held_out_loss": best.loss}

    def answered(done: int, total: int) -> None:
        console.print(f"all levels have answered {done:,} of {total:,} questions", highlight=False)

    job = score_job(start, recipe.score)
    trained, summary = head("score", job, recipe.score, learnt, held_out[0], names)
    for name, rows in zip(("shortened", "used"), held_out[1:], strict=False):
        summary[name] = keep_metrics(start.cfg, trained, rows.held_out())

    scores = keep_scores(start.cfg, trained, reader, questions)
    choices = {"levels": recipe.levels, "prompt_ratios": recipe.prompt_ratios}
    ask = functools.partial(answer, model, **choices)
    answers = kept_answers(run.folder / "answers", questions, scores, ask, answered)

    asked, held_out = (
        decision_rows(recipe, answers, questions, sides == side, reader, slos)
        for side, slos in ((False, MARKED_SLOS), (True, SLOS))
    )
    job = decide_job(start, trained, recipe.decide)
    best, decided_on = head("decide", job, recipe.decide, asked, held_out, list(map(str, SLOS)))
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
    run.finish(summary)
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
    tokens, mask = (np.stack([row[side][0] for row in rows]) for side in range(2))
    return DecisionRows(
        tokens, mask, labels, tuple(slos), reader.mark_ids, recipe.decide.batch, recipe.decide.seed
    )


# Number of rows that are scored in one dispatch.
_SCORED_ROWS = 32


def keep_scores(
    cfg: TlmConfig, params: Mapping[str, Any], reader: TinyReader, questions: Sequence[Question]
) -> list[np.ndarray]:
    """Returns the probability of keeping each token of each question's prompt, under the loosest SLO: `[T]`
    float64 per question (see `TinyReader.keep_likely`)."""
    rows = [reader.rows(each.prompt) for each in questions]
    tokens, mask = (np.concatenate([row[i] for row in rows]) for i in range(2))
    tokens = marked(tokens, SLOS[0], reader.mark_ids)
    score, logits = _scorer(cfg), np.zeros(tokens.shape, np.float32)
    for first in range(0, len(tokens), _SCORED_ROWS):
        places = np.minimum(np.arange(first, first + _SCORED_ROWS), len(tokens) - 1)
        logits[places] = score(params, tokens[places], mask[places])
    found, at = [], 0
    for question, (row, real) in zip(questions, rows, strict=True):
        found.append(reader.keep_likely(question.prompt, logits[at : at + len(row)], real))
        at += len(row)
    return found


def keep_metrics(
    cfg: TlmConfig, params: Mapping[str, Any], batches: Iterable[ScoreBatch]
) -> dict[str, float]:
    """Returns accuracy on labelled tokens, kept if that is more likely than not, and precision, recall and
    F1 of kept ones; `majority` is the accuracy, `kept_f1` the F1, of giving all tokens one label."""
    score = _scorer(cfg)
    counts = np.zeros((2, 2))
    for batch in batches:
        chosen = np.asarray(score(params, batch.tokens, batch.mask)) > 0
        real = batch.weights > 0
        places = (batch.labels[real] > 0.5).astype(int), chosen[real].astype(int)
        np.add.at(counts, places, batch.weights[real])
    (_, wrong), (missed, right) = counts
    total, kept = max(counts.sum(), 1e-9), max(missed + right, 1e-9)
    shares = {
        "accuracy": counts.trace() / total,
        "precision": right / max(right + wrong, 1e-9),
        "recall": right / kept,
        "f1": 2 * right / max(2 * right + wrong + missed, 1e-9),
        "majority": max(kept, total - kept) / total,
        "kept_f1": 2 * kept / (kept + total),
    }
    return {name: round(float(each), 4) for name, each in shares.items()}


def decisions(cfg: TlmConfig, params: Mapping[str, Any], rows: DecisionRows) -> np.ndarray:
    """The tiny LM's choices `[N, S, 2]` for all questions under all objectives of some rows."""
    decide = jax.jit(functools.partial(tlm.decide, cfg=cfg))
    chosen = []
    for batch in rows.held_out():
        likely = [np.asarray(each).argmax(-1) for each in decide(params, batch.tokens, batch.mask)]
        chosen.append(np.stack(likely, axis=-1)[batch.weights[:, 0] > 0])
    return np.concatenate(chosen).reshape(rows.labels.shape)


def decision_metrics(chosen: np.ndarray, labels: np.ndarray, slos: Sequence[Slo]) -> dict[str, Any]:
    """Returns shares of decisions with the labelled level, the labelled prompt ratio and both, and both by
    SLO.

    `majority` is the share for a choice by only the SLO, the commonest label of each.

    Args:
      chosen, labels: `[N, S, 2]` int.
    """
    right = chosen == labels
    both = right.all(-1)
    pairs = labels @ np.array([1 << 16, 1])
    commonest = sum(np.unique(column, return_counts=True)[1].max() for column in pairs.T)
    by_slo = {str(slo): round(float(each), 4) for slo, each in zip(slos, both.mean(0), strict=True)}
    shares = {
        "accuracy": both.mean(),
        "model_accuracy": right[..., 0].mean(),
        "prompt_accuracy": right[..., 1].mean(),
        "majority": commonest / pairs.size,
    }
    return {name: round(float(each), 4) for name, each in shares.items()} | {"accuracy_by_slo": by_slo}


def answer_metrics(
    answers: Answers,
    chosen: np.ndarray,
    slos: Sequence[Slo],
    levels: Sequence[int],
    prompt_ratios: Sequence[float],
) -> dict[str, dict[str, float]]:
    """Returns shares of questions that decisions answer right within each SLO.

    Args:
      answers: answers to N questions.
      chosen: `[N, S, 2]` int, the decisions; one that does not meet its SLO is replaced by the default.
      levels, prompt_ratios: meanings of the classes.

    Returns:
      The share of questions answered right with the choice that was `decided`, the `default`, and the
      `best` choice for each, by SLO.
    """
    correct, shares = answers.correct, answers.shares
    choices = (slos, levels, prompt_ratios, shares)
    default = lightest(np.zeros_like(correct), *choices)
    questions, objectives = np.ogrid[: len(chosen), : len(slos)]
    meets = allowed_choices(*choices)[questions, objectives, chosen[..., 0], chosen[..., 1]]
    decisions = {
        "decided": np.where(meets[..., None], chosen, default),
        "default": default,
        "best": lightest(correct, *choices),
    }
    right = {name: correct[questions, each[..., 0], each[..., 1]].mean(0) for name, each in decisions.items()}
    return {
        str(slo): {name: round(float(each[number]), 4) for name, each in right.items()}
        for number, slo in enumerate(slos)
    }


@functools.lru_cache(maxsize=4)
def _scorer(cfg: TlmConfig) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(tlm.score, cfg=cfg))
