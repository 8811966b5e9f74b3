"""Measures what quantizing activations costs a trained model, as it is and with outliers put in.

Perplexity of a text that no system was calibrated on, and right answers to tasks' questions, by the whole
model's pass over the text under each quantizer's products. Small trained models have no outliers; those of
large ones are put in without changing the function (`jaxllm.int8_prefill.calibration`), and rows say so.
Where LiteRT and its converter are installed, the text is also scored by the TFLite programs that `jaxllm
export --precision w8a8` makes of ours, in the arithmetic of their prefill.

The part `pruning` measures what layers without a shadow cost. The most important layers have a shadow, from
none of them to all. The others clip what exceeds the step of a shadow (`jaxllm-clipped`, the pruning of the
paper's section 3.3), take a wide one (`jaxllm-wide`), or the one of both that changes the layer's products
less (`jaxllm`, what calibration does).
"""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.children import exported
from benchmarks.harness.report import OURS, Row, compared
from benchmarks.int8_prefill import Plan
from benchmarks.int8_prefill.activation_quantizers import PER_TENSOR, rule_of
from benchmarks.models import Checkpoint
from benchmarks.peers.peer import missing_packages
from benchmarks.samples import read_examples, stories_file, story_tokens
from jaxllm.bundle import write_bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.bundle.layout import contracted_axis
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.programs.model import open_program
from jaxllm.int8_prefill import calibration as fitted_by
from jaxllm.int8_prefill.fitting import LEAST_TOKENS, fit_calibration, product_weights, whole_rows
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.int8_prefill.reference import integer_rule, plain_rule, scores_by_rule
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import quantize, to_blocks
from jaxllm.serving.host.progress import Progress
from jaxllm.tasks.questions import branching
from jaxllm.text.prompts import end_of_turn_id
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model in floats and at 8 bits, with a scale per output and with one per tensor, as rows name it."""

    case: str
    files: TokenizerFiles
    cfg: ModelConfig
    floats: dict[str, jax.Array]
    stored: dict[str, Any]
    per_tensor: dict[str, Any]


def subjects(model: Path, plan: Plan, stage: str, progress: Progress = silent) -> Iterator[Subject]:
    """The model as it is and with outliers put in, as the plan asks; `progress` gets the stage."""
    checkpoint = Checkpoint.find(model, progress)
    folder = checkpoint.folder(progress)
    cfg, files = checkpoint.cfg, read_tokenizer(folder)
    plain = {name: np.asarray(value, np.float32) for name, value in read_params(folder, cfg)}
    # One channel in 64 is an outlier, as in large models.
    recipe = fitted_by.OutlierRecipe(channels=max(1, cfg.hidden_size // 64), factor=plan.factor)
    for done, outliers in enumerate(plan.outliers, start=1):
        params = fitted_by.with_outliers(cfg, plain, recipe) if outliers else plain
        case = f"{checkpoint.name}, {'with outliers put in' if outliers else 'as it is'}"
        yield _subject(case, files, cfg, params)
        progress(stage, done, len(plan.outliers))


def texts_of(subject: Subject, plan: Plan) -> tuple[list[np.ndarray], ...]:
    """Rows of tokens to calibrate on, to hold out, and to score."""
    length = min(plan.row_tokens, subject.cfg.window_tokens)
    rows = whole_rows(story_tokens(Tokenizer(subject.files), plan.data), length)
    calibrating = max(plan.rows // 4, -(-LEAST_TOKENS // length))
    if len(rows) < 2 * calibrating + plan.rows:
        raise ConfigError(
            f"{stories_file(plan.data)} has {len(rows)} rows of {length} tokens, and this takes "
            f"{2 * calibrating + plan.rows}; give more text with --data"
        )
    return rows[:calibrating], rows[calibrating : 2 * calibrating], rows[2 * calibrating :][: plan.rows]


def perplexity_of(score: Callable[[np.ndarray], Any], rows: Sequence[np.ndarray]) -> float:
    """The perplexity of rows of tokens, by a function that gives the log-probabilities of one."""
    return math.exp(-sum(float(score(row).sum()) for row in rows) / scored_tokens(rows))


def scored_tokens(rows: Sequence[np.ndarray]) -> int:
    """How many tokens of rows have another before them."""
    return sum(len(row) - 1 for row in rows)


def _subject(case: str, files: TokenizerFiles, cfg: ModelConfig, params: dict[str, np.ndarray]) -> Subject:
    specs, stored = param_specs(cfg), {}
    for name, value in params.items():
        kept = value
        if specs[name].role != "vector":
            kept = to_blocks(quantize(value, bits=8, axis=contracted_axis(specs[name])))
        stored[name] = jax.tree.map(jnp.asarray, kept)
    # The embeddings are the same for all quantizers.
    arrays = {name: value for name, value in params.items() if specs[name].role == "embed"}
    stored |= arrays
    shared = jax.tree.map(jnp.asarray, product_weights(cfg, params, per_tensor=True))  # pyright: ignore[reportArgumentType]
    floats = {name: jnp.asarray(value) for name, value in params.items()}
    return Subject(case, files, cfg, floats, stored, {**stored, **shared})


def accuracy_rows(subject: Subject, plan: Plan) -> list[Row]:
    """Perplexity and accuracy of every quantizer."""
    cfg, case = subject.cfg, subject.case
    known, held_out, judged = texts_of(subject, plan)
    weights = {OURS: subject.stored}
    if PER_TENSOR in plan.quantizers:
        weights[PER_TENSOR] = subject.per_tensor
    fitted = {
        name: fit_calibration(cfg, subject.floats, stored, known, held_out).calibration
        for name, stored in weights.items()
    }
    tops = fitted_by.Observer(cfg, subject.floats, known).tops
    questions = _questions(Tokenizer(subject.files), plan, cfg)
    perplexity: dict[str, float] = {}
    right: dict[str, float] = {}
    for name in plan.quantizers:
        stored, calibration = weights.get(name, subject.stored), fitted.get(name, fitted[OURS])
        taken, make = rule_of(name, cfg, subject.floats, stored, tops, calibration, known)
        params = weights.get(name, subject.floats)

        @jax.jit
        def scores(params: Any, taken: Any, row: jax.Array, make: Any = make) -> jax.Array:
            return scores_by_rule(params, row[:-1], row[1:], make(taken), cfg=cfg)

        def score(row: np.ndarray, params: Any = params, taken: Any = taken, scores: Any = scores):
            return np.asarray(scores(params, taken, row))

        perplexity[name] = perplexity_of(score, judged)
        if questions:
            right[name] = _accuracy(score, questions)
    if missing() is None:
        floats = {name: np.asarray(value) for name, value in subject.floats.items()}
        with tempfile.TemporaryDirectory() as folder:
            by_programs = exported_scores(cfg, floats, subject.files, fitted[OURS], known, Path(folder))
            perplexity[EXPORTED] = perplexity_of(by_programs, judged)
    notes: dict[str, str | None] = {
        name: f"{value / perplexity['float'] - 1:+.2%} against float" for name, value in perplexity.items()
    }
    for name, calibration in fitted.items():
        shadow = f"{sum(calibration.shadowed)} of {cfg.layers} layers with shadow"
        notes[name] = f"{notes[name]}; {shadow}; {scored_tokens(judged):,} tokens"
    found = compared(case, "perplexity", perplexity, notes)
    if right:
        differences: dict[str, str | None] = {
            name: f"{100 * (value - right['float']):+.1f} points; {len(questions)} questions"
            for name, value in right.items()
        }
        found += compared(case, "accuracy", right, differences)
    return found


def _questions(
    tokenizer: Tokenizer, plan: Plan, cfg: ModelConfig
) -> list[tuple[list[tuple[list[int], int]], int]]:
    """Each question's options as (tokens, where the option begins), and the index of the right one."""
    if not tokenizer.has_chat_template:
        # A model without a chat template was not trained on tasks, and answers by chance.
        return []
    found = []
    end = end_of_turn_id(tokenizer)
    for examples in read_examples(plan.tasks, plan.data, plan.questions).values():
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


EXPORTED = "jaxllm-tflite-w8a8"


def missing() -> str | None:
    """What makes or runs TFLite programs and is not installed; None if all is."""
    return missing_packages("litert_converter", "ai_edge_litert")


def exported_scores(
    cfg: ModelConfig,
    floats: dict[str, np.ndarray],
    tokenizer: TokenizerFiles,
    calibration: fitted_by.PrefillCalibration,
    known: Sequence[np.ndarray],
    folder: Path,
) -> Callable[[np.ndarray], np.ndarray]:
    """What scores the tokens of a row `[T]` after its first, log-probabilities `[T - 1]`.

    Args:
      known: rows of the calibration text, of one length, which rows to score have, too.
      folder: for the bundle, the text and the programs.
    """
    bundle, text, programs = folder / "model.jaxllm", folder / "text.txt", folder / "programs"
    parts, name = prefill_parts(calibration), "calibrated"
    write_bundle(
        bundle, cfg=cfg, params=floats.items(), weights="int8", tokenizer=tokenizer, name=name, parts=parts
    )
    text.write_text(Tokenizer(tokenizer).decode(np.concatenate(known).tolist()), encoding="utf-8")
    length = len(known[0])
    static = ("--format", "tflite", "--precision", "w8a8", "--calibration-text", text, "--static-verify")
    sizes = ("--context", length, "--verify-tokens", length, "--chunk-tokens", length, "--cache-tokens", 0)
    exported(bundle, programs, *static, *sizes)
    runner = open_program(programs).runner
    return lambda row: runner.score(row[:-1].tolist(), row[1:].tolist())


CLIPPED, WIDE = f"{OURS}-clipped", f"{OURS}-wide"


def pruned_calibrations(
    cfg: ModelConfig, floats: Params, texts: Sequence[np.ndarray]
) -> Iterator[dict[str, tuple[fitted_by.PrefillCalibration, int]]]:
    """For each number of layers with a shadow, calibrations by system, and how many layers clip."""
    observer = fitted_by.Observer(cfg, floats, texts)
    steps = fitted_by.clipping_steps(observer.tops, ShadowRecipe()), fitted_by.whole_steps(observer.tops)
    counts = observer.counts(steps[0])
    choices = {OURS: observer.clipped(steps), WIDE: (False,) * cfg.layers, CLIPPED: (True,) * cfg.layers}
    importance = fitted_by.importances(observer.tops, steps[0])
    for shadows in fitted_by.shadow_counts(cfg.layers, pruned_share=1.0):
        shadowed = fitted_by.most_important(importance, shadows)
        found = {}
        for name, clips in choices.items():
            clipped = tuple(clip and not own for clip, own in zip(clips, shadowed, strict=True))
            calibration = fitted_by.assembled(
                cfg, floats, counts, levels={FULL_LEVEL: steps}, shadowed=shadowed, clipped=clipped
            )
            found[name] = calibration, sum(clipped)
        # Where all layers have a shadow, nothing is left to choose.
        yield found if shadows < cfg.layers else {OURS: found[OURS]}


def pruning_rows(subject: Subject, plan: Plan) -> list[Row]:
    """Perplexity by how many layers have a shadow and by what the others do."""
    cfg = subject.cfg
    texts, _, judged = texts_of(subject, plan)

    @jax.jit
    def scores(params: Params, layers: Any, row: jax.Array) -> jax.Array:
        rule = plain_rule(params, cfg) if layers is None else integer_rule(params, layers, cfg)
        return scores_by_rule(params, row[:-1], row[1:], rule, cfg=cfg)

    exact = perplexity_of(lambda row: scores(subject.floats, None, row), judged)
    rows = []
    for by_system in pruned_calibrations(cfg, subject.floats, texts):
        found, notes = {"float": exact}, {}
        by_steps: dict[bytes, float] = {}
        for name, (calibration, clipped) in by_system.items():
            layers, steps = calibration.layers(FULL_LEVEL, cfg), calibration.steps.tobytes()
            # Calibration often chooses the same for all layers.
            if steps not in by_steps:
                by_steps[steps] = perplexity_of(
                    lambda row, layers=layers: scores(subject.stored, layers, row), judged
                )
            found[name] = by_steps[steps]
            notes[name] = (
                f"{found[name] / exact - 1:+.2%} against float; {clipped} of {cfg.layers} layers clip; "
                f"{scored_tokens(judged):,} tokens"
            )
        shadows = sum(by_system[OURS][0].shadowed)
        case = f"{subject.case}, shadow in {shadows} of {cfg.layers} layers"
        rows += compared(case, "perplexity", found, notes)
    return rows
