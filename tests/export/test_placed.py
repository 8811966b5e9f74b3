"""Export layer by layer: how much of a model is in memory, and what is written."""

import dataclasses
import functools
import json
import weakref

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.cli.main import cli
from jaxllm.export.by_layer import run_by_layer
from jaxllm.export.forecast import forecast
from jaxllm.export.signatures import ExportPlan, step_weights, subject_step
from jaxllm.export.subject import Arrays, Subject
from jaxllm.export.verification import example_arguments
from jaxllm.kernels.native import without_native_kernels
from tests.export.models import CONTEXT

PLAN = ExportPlan(
    context_tokens=CONTEXT, chunk_tokens=(16,), verify_tokens=(8,), cache_tokens=(), levels=(40,)
)


class Counted:
    """The readers of a subject's arrays, which count the bytes that are alive of those they have read."""

    def __init__(self, subject):
        self.alive, self.most, self.read = 0, 0, []
        read = functools.partial(self._read, subject.arrays)
        self.subject = dataclasses.replace(subject, arrays=Arrays(subject.arrays.shapes, read))

    def _read(self, arrays, name):
        array = arrays[name]
        self.read.append(name)
        if name.startswith("level_"):
            # In memory all the time: as many bytes as a bundle has of them.
            return array
        self.alive += array.nbytes
        self.most = max(self.most, self.alive)
        owner = array if array.base is None else array.base
        weakref.finalize(owner, self._freed, array.nbytes)
        return array

    def _freed(self, size):
        self.alive -= size


def largest_layer(subject):
    sizes = {}
    for name, shape in subject.arrays.shapes.items():
        if not name.startswith("level_"):
            layer = ".".join(name.split(".")[:2])
            sizes[layer] = sizes.get(layer, 0) + 4 * int(np.prod(shape.shape))
    return max(sizes.values())


def test_an_opened_model_has_read_no_weights(subject):
    counted = Counted(subject)
    assert counted.subject.weights(40).keys() == counted.subject.levels[40].weights.keys()
    assert not counted.read


@pytest.mark.parametrize("name", ["decode", "verify_8", "level_40_prefill_16", "block_4"])
def test_a_step_by_layer(subject, name):
    counted = Counted(subject)
    plan = dataclasses.replace(PLAN, block_tokens=4).resolved(subject.cfg)
    (signature,) = (each for level in (40, 100) for each in plan.signatures(level, str) if each.name == name)
    inputs = example_arguments(
        signature, plan.interface(signature, subject, np.dtype(np.float32)), subject.cfg.vocab_size, CONTEXT
    )
    step = subject_step(signature, subject, np.dtype(np.float32), loops=False)
    with without_native_kernels():
        wanted = jax.jit(step)(dict(step_weights(signature, subject)), *inputs)
        found = run_by_layer(step, step_weights(signature, counted.subject), *inputs)
    assert found.keys() == wanted.keys()
    for each in wanted:
        np.testing.assert_allclose(found[each], wanted[each], rtol=1e-4, atol=1e-5, err_msg=each)
    assert 0 < counted.most <= 2 * largest_layer(subject)


@pytest.mark.parametrize("precision", ["f32", "int8", "int4"])
def test_an_export_holds_one_layer(subject, precision, tmp_path):
    pytest.importorskip("litert_converter")
    from jaxllm.export.tflite import FILE, export_tflite

    counted = Counted(subject)
    _, sharing = export_tflite(counted.subject, tmp_path / "programs", PLAN, precision=precision)
    assert 0 < counted.most <= 2 * largest_layer(subject)
    lines = "\n".join(forecast(subject, PLAN, kind="tflite", precision=precision))
    assert "6 programs" in lines.replace("programs: 6", "6 programs")
    size = (tmp_path / "programs" / FILE).stat().st_size
    forecasted = 1e6 * float(lines.partition("weights: ")[2].split()[0])
    assert sharing.stored_bytes < 1.1 * forecasted + 1e5 < 3 * size


def test_matrices_placed_are_those_that_the_converter_writes(subject, tmp_path):
    """By the way of matrices that are computed of others, as those of w8a8: as constants."""
    pytest.importorskip("litert_converter")
    from jaxllm.export.converter import convert, traced, write_model
    from jaxllm.export.placed import PlacedMatrices, described_weights
    from jaxllm.export.signatures import step_shapes
    from jaxllm.export.tflite import _params_of, with_whole_outputs
    from jaxllm.export.verification import run_of_model
    from tests.export.operators import operators

    plan, dtype = PLAN.resolved(subject.cfg), np.dtype(np.float32)
    levels = {level: with_whole_outputs(subject, level) for level in subject.levels}
    subject = dataclasses.replace(subject, levels=levels)
    signatures = [each for level in (40, 100) for each in plan.signatures(level, str)]
    results, found = [], []
    params_of = _params_of({}, {}, floats=True)
    for weights_of in (Subject.weights, described_weights):
        made = [
            traced(
                each.name,
                subject_step(each, subject, dtype, loops=False, params_of=params_of),
                weights_of(subject, each.level),
                *step_shapes(each, subject, plan, dtype)[1:],
            )
            for each in signatures
        ]
        path = tmp_path / weights_of.__name__
        write_model(path, convert(made), PlacedMatrices(subject, "f32"))
        found.append(operators(path.read_bytes()))
        with run_of_model(path) as run:
            for each in signatures:
                interface = plan.interface(each, subject, dtype)
                inputs = example_arguments(each, interface, subject.cfg.vocab_size, CONTEXT)
                results.append(dict(run(each, *inputs)))
    count = len(signatures)
    for wanted, other in zip(results[:count], results[count:], strict=True):
        assert wanted.keys() == other.keys()
        for name in wanted:
            np.testing.assert_allclose(other[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for name in found[0]:
        products = [
            {each: many for each, many in of[name].items() if each.name == "FULLY_CONNECTED"} for of in found
        ]
        assert products[0] == products[1], name


def test_a_dry_run_reads_a_config_alone(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = CliRunner().invoke
    wanted = ["export", str(tmp_path), "--format", "device", "--context", "2048", "--dry-run"]
    done = run(cli, [*wanted, "--precision", "int4"])
    assert not done.exit_code, done.output
    assert "programs: 8 (6 prefill, 2 decode)" in done.output
    assert "weights: 4,980.7 MB (embedding and head 1,053.8 MB, layers 3,926.9 MB)" in done.output
    assert "512 tokens 134.2 MB, 2048 tokens 536.9 MB" in done.output
    for options, wrong in (
        (["--precision", "w8a8"], "--dry-run goes with"),
        (["--format", "stablehlo"], "--dry-run goes with"),
        (["--level", "50"], "has no levels"),
    ):
        failed = run(cli, [*wanted, *options])
        assert failed.exit_code
        assert wrong in f"{failed.output} {failed.exception}"
