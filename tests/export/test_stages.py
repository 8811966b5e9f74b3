"""Stages of prefill as programs of two processors: what they compute, and where they are refused."""

import dataclasses
import os

import numpy as np
import pytest

from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError
from jaxllm.export.device.opening import needed_bytes, open_device, weights_bytes
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import STAGE_FILES, stage_name
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.recipe import ORDERS
from jaxllm.int8_prefill.schedule import simulate
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.operators import Operator, operators
from tests.int8_prefill.calibrated import calibrated, outlying, texts
from tests.tiny import write_tiny_bundle

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.programs.stages import StagePrograms, TimedStage
from jaxllm.export.quantized import calibrate, quantized_subject
from jaxllm.export.tflite import export_tflite

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
    ends = {run.index: run.end_ms for run in trace.runs}
    assert sorted(ends) == list(range(len(subgraphs)))
    for run in trace.runs:
        assert all(ends[need] <= run.start_ms for need in subgraphs[run.index].needs)


@two_cores
def test_a_device_answers_by_stages_as_by_whole_programs(folder, whole, monkeypatch, tmp_path):
    """And keeps their times for the next start, which measures nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = open_device(folder, processors=2)
    stages = engine.model.stages
    assert stages is not None
    assert engine.generate(PROMPT, GREEDY).tokens == whole[1]
    # Its simulator has what it measured.
    chunks = [(16, 0), (16, 16)]
    times = stages.times_of(chunks)
    assert all(times(each) > 0 for each in stages.subgraphs(2))
    assert simulate(stages.subgraphs(2), times).makespan_ms > 0
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
    lacking = {name: each for name, each in manifest.files.items() if name != STAGE_FILES["float"]}
    dataclasses.replace(manifest, files=lacking).write(tmp_path)
    with pytest.raises(ProgramError, match=r"there is no file stages_float.tflite"):
        Manifest.read(tmp_path)
    with pytest.raises(ConfigError, match="stages for two processors are of w8a8 models"):
        export_tflite(read_subject(folder.parent / "tiny.jaxllm"), tmp_path / "out", PLAN, precision="int8")
