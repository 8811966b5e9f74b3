"""Measures what quantizing activations costs a trained model, as it is and with outliers put in.

Perplexity of a text that no system was calibrated on, and right answers to tasks' questions, by the whole
model's pass over the text under each quantizer's products. Small trained models have no outliers; those of
large ones are put in without changing the function (`jaxllm.int8_prefill.outliers`), and rows say so. Where
LiteRT and its converter are installed, ours is also exported (`exported.py`).
"""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring.report import Row, compared
from benchmarks.models.checkpoint import Checkpoint
from benchmarks.prefill.activation_quantizers import OURS, PER_TENSOR, QUANTIZERS, rotated_steps, rule_of
from benchmarks.prefill.exported import EXPORTED, exported_scores, missing
from benchmarks.samples.questions import read_examples
from benchmarks.samples.stories import stories_file, story_tokens
from jaxllm.bundle.layout import contracted_axis
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import channel_tops, largest_of
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, fit_calibration, per_tensor_weights, whole_rows
from jaxllm.int8_prefill.outliers import OutlierRecipe, with_outliers
from jaxllm.int8_prefill.reference import observed, scores_by_rule
from jaxllm.models.parameters import param_specs
from jaxllm.quant import quantize, to_blocks
from jaxllm.tasks.branching import branching
from jaxllm.text.prompts import end_of_turn_id
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from serving.host.progress import Progress

# One channel in so many is an outlier, as in large models.
_CHANNELS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyPlan:
    """Sizes.

    Attributes:
      rows: of text, to score; a quarter as many, at least 2,048 tokens, calibrate, and as many are held out.
      row_tokens: of each.
      tasks: whose questions are asked.
      questions: of each task.
      factor: of the outliers that are put in.
      outliers: whether the model is measured as it is (False), with outliers put in (True), or both.
      quantizers: of `QUANTIZERS`, to compare; `float` and ours are among them.
    """

    rows: int = 64
    row_tokens: int = 256
    tasks: tuple[str, ...] = ("sentiment", "news", "emotion")
    questions: int = 60
    factor: int = 64
    outliers: tuple[bool, ...] = (False, True)
    quantizers: tuple[str, ...] = QUANTIZERS

    @classmethod
    def quick(cls, *, tasks: bool = False) -> "AccuracyPlan":
        """Fits in a minute for a model of a million parameters; `tasks` asks the questions of one, too."""
        quantizers = tuple(each for each in QUANTIZERS if each != PER_TENSOR)
        return cls(rows=8, tasks=("sentiment",) if tasks else (), questions=10, quantizers=quantizers)


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A model in floats and at 8 bits, with a scale per output and with one per tensor."""

    cfg: ModelConfig
    floats: dict[str, jax.Array]
    stored: dict[str, Any]
    per_tensor: dict[str, Any]


def accuracy_rows(
    model: Path, data: Path | None, plan: AccuracyPlan, progress: Progress | None = None
) -> list[Row]:
    """Perplexity and accuracy of every quantizer.

    Args:
      model: a trained model, a bundle or a Hugging Face folder.
      data: the folder of texts and tasks; None takes packaged samples.
      plan: how much.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: there is too little text.
    """
    progress = progress or (lambda *_: None)
    checkpoint = Checkpoint.find(model)
    folder = checkpoint.folder(progress)
    cfg, tokenizer = checkpoint.cfg, read_tokenizer(folder)
    plain = {name: np.asarray(value, np.float32) for name, value in read_params(folder, cfg)}
    recipe = OutlierRecipe(channels=max(1, cfg.hidden_size // _CHANNELS), factor=plan.factor)
    rows = []
    for done, outliers in enumerate(plan.outliers, start=1):
        params = with_outliers(cfg, plain, recipe) if outliers else plain
        case = f"{checkpoint.name}, {'with outliers put in' if outliers else 'as it is'}"
        rows += _rows_of(_subject(cfg, params), tokenizer, data, plan, case)
        progress("accuracy", done, len(plan.outliers))
    return rows


def _subject(cfg: ModelConfig, params: dict[str, np.ndarray]) -> _Subject:
    specs, stored = param_specs(cfg), {}
    for name, value in params.items():
        kept = value
        if specs[name].role != "vector":
            kept = to_blocks(quantize(value, bits=8, axis=contracted_axis(specs[name])))
        stored[name] = jax.tree.map(jnp.asarray, kept)
    # The embeddings are the same for all quantizers.
    arrays = {name: value for name, value in params.items() if specs[name].role == "embed"}
    stored |= arrays
    shared = jax.tree.map(jnp.asarray, per_tensor_weights(cfg, params))  # pyright: ignore[reportArgumentType]
    return _Subject(
        cfg, {name: jnp.asarray(value) for name, value in params.items()}, stored, {**stored, **shared}
    )


def _rows_of(
    subject: _Subject, files: TokenizerFiles, data: Path | None, plan: AccuracyPlan, case: str
) -> list[Row]:
    cfg, tokenizer = subject.cfg, Tokenizer(files)
    length = min(plan.row_tokens, cfg.window_tokens)
    rows = whole_rows(story_tokens(tokenizer, data), length)
    calibrating = max(plan.rows // 4, -(-LEAST_TOKENS // length))
    if len(rows) < 2 * calibrating + plan.rows:
        raise ConfigError(
            f"{stories_file(data)} has {len(rows)} rows of {length} tokens, and this takes "
            f"{2 * calibrating + plan.rows}; give more text with --data"
        )
    known, held_out = rows[:calibrating], rows[calibrating : 2 * calibrating]
    judged = rows[2 * calibrating :][: plan.rows]
    weights = {OURS: subject.stored}
    if PER_TENSOR in plan.quantizers:
        weights[PER_TENSOR] = subject.per_tensor
    fitted = {
        name: fit_calibration(cfg, subject.floats, stored, known, held_out).calibration
        for name, stored in weights.items()
    }
    look = jax.jit(lambda params, row: channel_tops(params, row, cfg=cfg))
    tops = largest_of([jax.device_get(look(subject.floats, row)) for row in known])
    questions = _questions(tokenizer, data, plan, cfg)
    nats: dict[str, float] = {}
    right: dict[str, float] = {}
    for name in plan.quantizers:
        stored, calibration = weights.get(name, subject.stored), fitted.get(name, fitted[OURS])
        taken, make = rule_of(name, cfg, subject.floats, stored, tops, calibration)
        if name == "Hadamard":
            taken = rotated_steps(taken, _seen_behind(subject, taken, known))
        params = weights.get(name, subject.floats)

        @jax.jit
        def scores(params: Any, taken: Any, row: jax.Array, make: Any = make) -> jax.Array:
            return scores_by_rule(params, row[:-1], row[1:], make(taken), cfg=cfg)

        def score(row: np.ndarray, params: Any = params, taken: Any = taken, scores: Any = scores):
            return np.asarray(scores(params, taken, row))

        nats[name] = -sum(float(score(row).sum()) for row in judged) / (len(judged) * (length - 1))
        if questions:
            right[name] = _accuracy(score, questions)
    if missing() is None:
        floats = {name: np.asarray(value) for name, value in subject.floats.items()}
        with tempfile.TemporaryDirectory() as folder:
            by_programs = exported_scores(cfg, floats, files, fitted[OURS], known, Path(folder))
            nats[EXPORTED] = -sum(float(by_programs(row).sum()) for row in judged) / (
                len(judged) * (length - 1)
            )
    perplexity = {name: math.exp(each) for name, each in nats.items()}
    notes: dict[str, str | None] = {
        name: f"{value / perplexity['float'] - 1:+.2%} against float" for name, value in perplexity.items()
    }
    for name, calibration in fitted.items():
        shadow = f"{sum(calibration.shadowed)} of {cfg.layers} layers with shadow"
        notes[name] = f"{notes[name]}; {shadow}; {len(judged) * (length - 1):,} tokens"
    found = compared(
        perplexity, ours=OURS, case=case, metric="perplexity", unit="", notes=notes, lower_is_better=True
    )
    if right:
        told: dict[str, str | None] = {
            name: f"{100 * (value - right['float']):+.1f} points; {len(questions)} questions"
            for name, value in right.items()
        }
        found += compared(right, ours=OURS, case=case, metric="accuracy", unit="share", notes=told)
    return found


def _seen_behind(subject: _Subject, arrays: Any, texts: list[np.ndarray]) -> Any:
    """The largest magnitudes of the products' inputs after the rotation of `Hadamard`."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x @ arrays[layer][product][1]), axis=0)

    seen = jax.jit(lambda params, row: observed(params, row, look, cfg=subject.cfg))
    return largest_of([jax.device_get(seen(subject.floats, row)) for row in texts])


def _questions(
    tokenizer: Tokenizer, data: Path | None, plan: AccuracyPlan, cfg: ModelConfig
) -> list[tuple[list[tuple[list[int], int]], int]]:
    """Each question's options as (tokens, where the option begins), and the index of the right one."""
    if not tokenizer.has_chat_template:
        # A model without a chat template was not trained on tasks, and answers by chance.
        return []
    found = []
    end = end_of_turn_id(tokenizer)
    for examples in read_examples(plan.tasks, data, plan.questions).values():
        for example in examples:
            asked = branching(tokenizer, example, end)
            options = [([*asked.trunk, *branch], len(asked.trunk)) for branch in asked.branches]
            if max(len(each) for each, _ in options) <= min(plan.row_tokens, cfg.window_tokens):
                found.append((options, example.options.index(example.answer)))
    return found


def _accuracy(score: Any, questions: list[tuple[list[tuple[list[int], int]], int]]) -> float:
    hits = 0
    for options, answer in questions:
        sums = []
        for tokens, begin in options:
            # Padded to few lengths, so that little is compiled; a token does not see those behind it.
            row = np.zeros(-(-len(tokens) // 128) * 128 + 1, np.int32)
            row[: len(tokens)] = tokens
            sums.append(float(score(row)[begin - 1 : len(tokens) - 1].sum()))
        hits += int(np.argmax(sums)) == answer
    return hits / len(questions)
