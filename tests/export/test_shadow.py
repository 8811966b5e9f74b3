"""W8A8 programs of a trained model, as it is and with outliers put in: their prefill loses little."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from benchmarks.int8_prefill.accuracy import exported_scores, missing
from benchmarks.samples import story_tokens
from jaxllm.bundle import Bundle
from jaxllm.export.programs.model import open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.calibration import OutlierRecipe, with_outliers
from jaxllm.int8_prefill.fitting import random_calibration, whole_rows
from jaxllm.int8_prefill.reference import plain_rule, scores_by_rule
from jaxllm.kernels.native import without_native_kernels
from jaxllm.quant import dequantize
from jaxllm.text.tokenizer import Tokenizer
from tests.export.operators import Operator, operators

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.quantized import calibrate, quantized_subject
from jaxllm.export.tflite import FILE, export_tflite

LENGTH, KNOWN = 128, 12
NAIVE = ExportPlan(
    context_tokens=LENGTH, chunk_tokens=(16,), verify_tokens=(LENGTH,), cache_tokens=(), static_verify=True,
    without_shadow=True,
)  # fmt: skip
FLOATS = Operator("FULLY_CONNECTED", ("FLOAT32", "FLOAT32"), "FLOAT32")


@pytest.fixture(scope="module")
def trained():
    """The packaged draft: config, floats, tokenizer, and rows of text."""
    path = Path(jaxllm.__file__).parent / "assets" / "draft.jaxllm"
    with Bundle.open(path) as bundle, without_native_kernels():
        floats = {name: np.asarray(dequantize(each, jnp.float32)) for name, each in bundle.load().items()}
        files = bundle.tokenizer_files()
        rows = whole_rows(story_tokens(Tokenizer(files), None), LENGTH)
    return bundle.cfg, floats, files, rows


@pytest.mark.parametrize("outliers", [False, True])
def test_prefill_loses_less_than_a_hundredth_and_naive_steps_lose_all(trained, outliers, tmp_path):
    """By the command, as `jaxllm bench prefill` exports it."""
    cfg, floats, files, rows = trained
    params = with_outliers(cfg, floats, OutlierRecipe(channels=2)) if outliers else floats
    arrays = {name: jnp.asarray(each) for name, each in params.items()}
    known, judged = rows[:KNOWN], rows[KNOWN:]
    calibration = random_calibration(cfg, arrays, known, shadows=cfg.layers)
    exact = jax.jit(lambda row: scores_by_rule(arrays, row[:-1], row[1:], plain_rule(arrays, cfg), cfg=cfg))
    wanted = _perplexity([np.asarray(exact(row)) for row in judged])
    assert missing() is None
    score = exported_scores(cfg, params, files, calibration, known, tmp_path)
    assert abs(_perplexity([score(row) for row in judged]) / wanted - 1) < 0.01
    found = operators((tmp_path / "programs" / FILE).read_bytes())
    assert found[f"verify_{LENGTH}"][FLOATS] > 0
    # Decoding has no static steps, and thus no shadow.
    assert not any(each.name == "QUANTIZE" or each == FLOATS for each in found["decode"])
    if outliers:
        naive, subject = tmp_path / "naive", read_subject(tmp_path / "model.jaxllm")
        bare = quantized_subject(subject)[0]
        ranges = calibrate(bare.without_calibration(), np.concatenate(known).tolist())
        export_tflite(subject, naive, NAIVE, precision="w8a8", ranges=ranges)
        runner = open_program(naive, threads=1).runner
        scores = [runner.score(row[:-1].tolist(), row[1:].tolist()) for row in judged]
        assert _perplexity(scores) > 2 * wanted
        assert FLOATS not in operators((naive / FILE).read_bytes())[f"verify_{LENGTH}"]


def _perplexity(scores):
    return math.exp(-np.mean(np.concatenate(scores)))
