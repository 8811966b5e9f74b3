"""What each way to quantize activations costs a trained model, as it is and with outliers put into it.

Perplexity of a text that nobody was calibrated on, and right answers to tasks' questions, by the whole
model's pass over the text under the way's products: what prefill does to what comes behind it. Small trained
models have no outliers; those of large ones are put in without changing the function
(`jaxllm.prefill.outliers`), and rows say so. One number per model and way, on the same tokens.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.prefill.ways import OURS, PER_TENSOR, WAYS, rule_of, turned_steps
from benchmarks.report import Row, compared
from jaxllm.bundle.layout import contracted_axis
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.prefill.calibration import channel_tops, largest_of
from jaxllm.prefill.fitting import fit_calibration, per_tensor_weights, whole_rows
from jaxllm.prefill.outliers import OutlierRecipe, with_outliers
from jaxllm.prefill.reference import observed, scores_by_rule
from jaxllm.quant import quantize, to_blocks
from jaxllm.tasks.branching import branching
from jaxllm.tasks.prompts import end_of_turn_id
from jaxllm.tokenizer import Tokenizer
from serving.console import read_text
from serving.evaluation.tasks import read_questions
from serving.progress import Progress

_TEXT, _SEPARATOR = Path("text", "tinystories_valid.txt"), "<|endoftext|>"
# One channel in so many is an outlier, as in large models.
_CHANNELS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyPlan:
    """Sizes.

    Attributes:
      rows: of text, to judge on; a quarter as many, at least 2,048 tokens, to calibrate on and to hold out.
      row_tokens: of each.
      tasks: whose questions are asked.
      questions: of each task.
      factor: of the outliers that are put in.
    """

    rows: int = 64
    row_tokens: int = 256
    tasks: tuple[str, ...] = ("sentiment", "news", "emotion")
    questions: int = 60
    factor: int = 64

    @classmethod
    def quick(cls) -> "AccuracyPlan":
        """Fits in half a minute for a model of some hundred thousand parameters."""
        return cls(rows=12, questions=10, tasks=("sentiment",))


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A model in floats and at 8 bits, with a scale per output and with one per tensor."""

    cfg: ModelConfig
    floats: dict[str, jax.Array]
    stored: dict[str, Any]
    per_tensor: dict[str, Any]


def accuracy_rows(
    folders: list[Path], data: Path, plan: AccuracyPlan, progress: Progress | None = None
) -> list[Row]:
    """Perplexity and accuracy of every way.

    Args:
      folders: of trained models in Hugging Face's layout.
      data: the folder of texts and tasks.
      plan: how much.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: there is too little text.
    """
    rows, done = [], 0
    for folder in folders:
        cfg, tokenizer = read_config(folder), Tokenizer(read_tokenizer(folder))
        plain = {name: np.asarray(value, np.float32) for name, value in read_params(folder, cfg)}
        recipe = OutlierRecipe(channels=max(1, cfg.hidden_size // _CHANNELS), factor=plan.factor)
        for kind, params in (
            ("as it is", plain),
            ("with outliers put in", with_outliers(cfg, plain, recipe)),
        ):
            case = f"{folder.resolve().parent.name if folder.name == 'hf' else folder.name}, {kind}"
            rows += _rows_of(_subject(cfg, params), tokenizer, data, plan, case)
            done += 1
            if progress is not None:
                progress("accuracy", done, 2 * len(folders))
    return rows


def _subject(cfg: ModelConfig, params: dict[str, np.ndarray]) -> _Subject:
    specs, stored = param_specs(cfg), {}
    for name, value in params.items():
        kept = value
        if specs[name].role != "vector":
            kept = to_blocks(quantize(value, bits=8, axis=contracted_axis(specs[name])))
        stored[name] = jax.tree.map(jnp.asarray, kept)
    # The vocabulary's tables are the same for all ways.
    tables = {name: value for name, value in params.items() if specs[name].role == "embed"}
    stored |= tables
    shared = jax.tree.map(jnp.asarray, per_tensor_weights(cfg, params))  # pyright: ignore[reportArgumentType]
    return _Subject(
        cfg, {name: jnp.asarray(value) for name, value in params.items()}, stored, {**stored, **shared}
    )


def _rows_of(subject: _Subject, tokenizer: Tokenizer, data: Path, plan: AccuracyPlan, case: str) -> list[Row]:
    cfg = subject.cfg
    length = min(plan.row_tokens, cfg.window_tokens)
    texts = [text.strip() for text in read_text(data / _TEXT).split(_SEPARATOR)]
    tokens = [token for text in texts if text for token in tokenizer.encode(text)]
    rows = whole_rows(tokens, length)
    calibrating = max(plan.rows // 4, -(-2048 // length))
    if len(rows) < 2 * calibrating + plan.rows:
        raise ConfigError(f"{data / _TEXT} has {len(rows)} rows of {length} tokens; give more text")
    known, held_out = rows[:calibrating], rows[calibrating : 2 * calibrating]
    judged = rows[2 * calibrating :][: plan.rows]
    weights = {OURS: subject.stored, PER_TENSOR: subject.per_tensor}
    fitted = {
        name: fit_calibration(cfg, subject.floats, stored, known, held_out).calibration
        for name, stored in weights.items()
    }
    look = jax.jit(lambda params, row: channel_tops(params, row, cfg=cfg))
    tops = largest_of([jax.device_get(look(subject.floats, row)) for row in known])
    questions = _questions(tokenizer, data, plan, cfg)
    nats: dict[str, float] = {}
    right: dict[str, float] = {}
    for name in WAYS:
        stored, calibration = weights.get(name, subject.stored), fitted.get(name, fitted[OURS])
        taken, make = rule_of(name, cfg, subject.floats, stored, tops, calibration)
        if name == "Hadamard":
            taken = turned_steps(taken, _seen_behind(subject, taken, known))
        params = weights.get(name, subject.floats)

        @jax.jit
        def scores(params: Any, taken: Any, row: jax.Array, make: Any = make) -> jax.Array:
            return scores_by_rule(params, row[:-1], row[1:], make(taken), cfg=cfg)

        def score(row: np.ndarray, params: Any = params, taken: Any = taken, scores: Any = scores):
            return np.asarray(scores(params, taken, row))

        nats[name] = -sum(float(score(row).sum()) for row in judged) / (len(judged) * (length - 1))
        if questions:
            right[name] = _accuracy(score, questions)
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


def _seen_behind(subject: _Subject, tables: Any, texts: list[np.ndarray]) -> Any:
    """The largest magnitudes of inputs behind the rotation of `Hadamard`."""

    def look(layer: int, product: int, x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x @ tables[layer][product][1]), axis=0)

    seen = jax.jit(lambda params, row: observed(params, row, look, cfg=subject.cfg))
    return largest_of([jax.device_get(seen(subject.floats, row)) for row in texts])


def _questions(
    tokenizer: Tokenizer, data: Path, plan: AccuracyPlan, cfg: ModelConfig
) -> list[tuple[list[tuple[list[int], int]], int]]:
    """Of each question its options as (tokens, where the option begins), and the right one's place."""
    if not tokenizer.has_chat_template:
        # A model that was trained on no tasks answers by chance.
        return []
    found = []
    end = end_of_turn_id(tokenizer)
    for examples in read_questions(plan.tasks, data, plan.questions).examples.values():
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
            # A few lengths, so that few graphs are compiled; what is behind a token changes nothing of it.
            row = np.zeros(-(-len(tokens) // 128) * 128 + 1, np.int32)
            row[: len(tokens)] = tokens
            sums.append(float(score(row)[begin - 1 : len(tokens) - 1].sum()))
        hits += int(np.argmax(sums)) == answer
    return hits / len(questions)
