"""W8A8 programs: prefill of a trained model loses little, as it is and with outliers put in; its stages as
programs of two processors compute the same."""

import dataclasses
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from benchmarks.int8_prefill.accuracy import exported_scores, missing
from benchmarks.samples import story_tokens
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.export.device.opening import needed_bytes, open_device, weights_bytes
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import STAGE_FILES, stage_name
from jaxllm.export.programs.model import open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.calibration import OutlierRecipe, with_outliers
from jaxllm.int8_prefill.fitting import random_calibration, whole_rows
from jaxllm.int8_prefill.recipe import ORDERS
from jaxllm.int8_prefill.reference import plain_rule, scores_by_rule
from jaxllm.int8_prefill.schedule import simulate
from jaxllm.kernels.native import without_native_kernels
from jaxllm.quant import dequantize
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.text.tokenizer import Tokenizer
from tests.export.operators import Operator, operators
from tests.int8_prefill.calibrated import calibrated, outlying, texts
from tests.tiny import write_tiny_bundle

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.programs.stages import StagePrograms, TimedStage
from jaxllm.export.quantized import calibrate, quantized_subject
from jaxllm.export.tflite import FILE, export_tflite

CONTEXT, CHUNKS = 64, (8, 16)
PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), stages=True)
PROMPT = [(7 * i) % 250 + 1 for i in range(40)]
GREEDY = GenerationConfig(max_tokens=8, ignore_eos=True)
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two cores"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """W8A8 programs of the tiny model with outliers, one of whose layers has a shadow."""
    place = tmp_path_factory.mktemp("stages")
    bundle = write_tiny_bundle(
        place / "tiny.jaxllm", "int8", params=outlying(), parts=prefill_parts(calibrated())
    )
    subject = read_subject(bundle)
    ranges = calibrate(quantized_subject(subject)[0], texts().reshape(-1).tolist())
    export_tflite(subject, place / "programs", PLAN, precision="w8a8", ranges=ranges)
    return place / "programs"


@pytest.fixture(scope="module")
def whole(folder):
    """The cache of the prompt by whole prefill programs, and the answer."""
    engine = open_device(folder)
    runner = engine.runner
    _, cache = runner.prefill(runner.start(CONTEXT), [*PROMPT, 5], 0, runner.prefill_chunks(41)[0])
    return runner.rows(cache, len(PROMPT)), engine.generate(PROMPT, GREEDY).tokens


def test_each_processor_has_its_stages(folder):
    """Products of int8 are in one model, attention and the products of shadows in the other."""
    facts = Manifest.read(folder).stages
    assert facts is not None
    assert facts.chunk_tokens == CHUNKS
    assert sum(facts.shadowed) == 1
    integer, float_ = (operators((folder / STAGE_FILES[each]).read_bytes()) for each in ("integer", "float"))
    layer = facts.shadowed.index(True)
    assert {stage_name(each, layer, 16) for each in ("project", "widen", "narrow")} <= set(integer)
    assert {stage_name(each, layer, 16) for each in ("attend", "widen_shadow")} <= set(float_)
    static = Operator("FULLY_CONNECTED", ("INT8", "INT8"), "INT8")
    in_floats = Operator("FULLY_CONNECTED", ("FLOAT32", "FLOAT32"), "FLOAT32")
    plain = facts.shadowed.index(False)
    assert integer[stage_name("finish", plain, 16)][static] == 4
    assert not any(each[in_floats] for each in integer.values())
    assert not any(each[static] for each in float_.values())
    assert any(each[in_floats] for each in float_.values())


@two_cores
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_gives_what_whole_programs_give(folder, whole, order):
    stages = StagePrograms(Manifest.read(folder), folder, order=order)
    try:
        # The first rows as a cache that is there already, then chunks of both lengths, the last one padded.
        before, _ = stages.prefill(PROMPT[:5], 0, {}, [8])
        rows, trace = stages.prefill(PROMPT[5:], 5, before, [16, 16, 8])
    finally:
        stages.close()
    for name, wanted in whole[0].items():
        np.testing.assert_allclose(rows[name], wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))
    subgraphs = stages.subgraphs(3)
    assert sorted(run.index for run in trace.runs) == list(range(len(subgraphs)))


@two_cores
def test_a_device_answers_by_stages_as_by_whole_programs(folder, whole, monkeypatch, tmp_path):
    """And keeps their times for the next start, which measures nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = open_device(folder, processors=2)
    stages = engine.model.stages
    assert stages is not None
    assert engine.generate(PROMPT, GREEDY).tokens == whole[1]
    # Its simulator has what it measured.
    assert simulate(stages.subgraphs(2), stages.times_of([(16, 0), (16, 16)])).makespan_ms > 0
    engine.close()
    monkeypatch.setattr(StagePrograms, "measure", lambda *_: pytest.fail("times are known"))
    again = open_device(folder, processors=2)
    assert again.model.stages is not None
    assert TimedStage("attend", False, 16) in again.model.stages.measured
    again.close()


def test_what_lacks_stages_or_memory_is_refused(folder, tmp_path):
    manifest = Manifest.read(folder)
    assert weights_bytes(manifest) < weights_bytes(manifest, staged=True)
    with pytest.raises(BudgetExceeded, match="are allowed"):
        open_device(folder, processors=2, memory_bytes=needed_bytes(manifest))
    with pytest.raises(ConfigError, match="no stages for two processors; export the model with --stages"):
        StagePrograms(dataclasses.replace(manifest, stages=None), folder)
    with pytest.raises(ConfigError, match="stages for two processors are of w8a8 models"):
        export_tflite(read_subject(folder.parent / "tiny.jaxllm"), tmp_path / "out", PLAN, precision="int8")


# A trained model

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
