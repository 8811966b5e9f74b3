"""W8A8 programs of a trained model, as it is and with outliers put in: their prefill loses little."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from benchmarks.samples.stories import story_tokens
from export.signatures import ExportPlan
from export.subject import read_subject
from jaxllm.bundle import Bundle, write_bundle
from jaxllm.bundle.prefill import prefill_parts
from jaxllm.int8_prefill.fitting import random_calibration, whole_rows
from jaxllm.int8_prefill.outliers import OutlierRecipe, with_outliers
from jaxllm.int8_prefill.reference import plain_rule, scores_by_rule
from jaxllm.kernels.native import without_native_kernels
from jaxllm.quant import dequantize
from jaxllm.text.tokenizer import Tokenizer
from serving.engine import Engine
from tests.export.operators import Operator, operators

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from export.quantized import quantized_subject
from export.static_products import calibrate
from export.tflite import FILE, export_tflite

LENGTH, KNOWN = 128, 12
PLAN = ExportPlan(
    context_tokens=LENGTH, chunk_tokens=(16,), verify_tokens=(LENGTH,), cache_tokens=(), static_verify=True
)


@pytest.fixture(scope="module")
def trained():
    """The packaged draft: config, floats, tokenizer, rows of text."""
    with (
        Bundle.open(Path(jaxllm.__file__).parent / "assets" / "draft.jaxllm") as bundle,
        without_native_kernels(),
    ):
        floats = {name: np.asarray(dequantize(each, jnp.float32)) for name, each in bundle.load().items()}
        files = bundle.tokenizer_files()
        rows = whole_rows(story_tokens(Tokenizer(files), None), LENGTH)
    return bundle.cfg, floats, files, rows


@pytest.fixture(scope="module", params=["as it is", "with outliers"])
def model(request, trained, tmp_path_factory):
    """A calibrated bundle of it, and the perplexity of its floats."""
    cfg, floats, files, rows = trained
    params = floats if request.param == "as it is" else with_outliers(cfg, floats, OutlierRecipe(channels=2))
    arrays = {name: jnp.asarray(each) for name, each in params.items()}
    calibration = random_calibration(cfg, arrays, rows[:KNOWN], shadows=cfg.layers)
    path = tmp_path_factory.mktemp("trained") / "model.jaxllm"
    write_bundle(
        path, cfg=cfg, params=params.items(), weights="int8", tokenizer=files, name="draft",
        parts=prefill_parts(calibration),
    )  # fmt: skip
    score = jax.jit(lambda row: scores_by_rule(arrays, row[:-1], row[1:], plain_rule(arrays, cfg), cfg=cfg))
    return path, _perplexity([np.asarray(score(row)) for row in rows[KNOWN:]]), rows, request.param


def test_prefill_loses_less_than_a_hundredth_and_naive_steps_lose_all(model, tmp_path):
    path, wanted, rows, kind = model
    subject, tokens = read_subject(path), np.concatenate(rows[:KNOWN]).tolist()
    grown = {}
    for shadow in (True, False):
        known = subject if shadow else dataclasses.replace(subject, calibration=None)
        out = tmp_path / f"programs-{shadow}"
        export_tflite(
            subject,
            out,
            dataclasses.replace(PLAN, without_shadow=not shadow),
            precision="w8a8",
            ranges=calibrate(quantized_subject(known)[0], tokens),
        )
        runner = Engine.open_program(out, threads=1).runner
        scores = [runner.score(row[:-1].tolist(), row[1:].tolist()) for row in rows[KNOWN:]]
        grown[shadow] = _perplexity(scores) / wanted - 1
        found = operators((out / FILE).read_bytes())
        floats = sum(
            count
            for each, count in found[f"verify_{LENGTH}"].items()
            if each == Operator("FULLY_CONNECTED", ("FLOAT32", "FLOAT32"), "FLOAT32")
        )
        assert (floats > 0) == shadow
        # Decoding has no static steps, and thus no shadow.
        assert not any(each.name == "QUANTIZE" for each in found["decode"])
    assert abs(grown[True]) < 0.01
    if kind == "with outliers":
        assert grown[False] > 1


def _perplexity(scores):
    return math.exp(-np.mean(np.concatenate(scores)))
