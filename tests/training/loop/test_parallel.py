"""Meshes and process groups: the same losses however the work is divided, what is gathered, and what fits."""

import math
import re

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.errors import ConfigError
from jaxllm.training.loop.optimizer import orthogonal
from jaxllm.training.loop.parallel import (
    AXES,
    MeshShape,
    make_mesh,
    require_divisible,
    spec_of,
    start_process_group,
)
from tests.training.jobs import SMOKE
from tests.training.loop.meshes import MESHES, MODEL, gradients, views
from tests.training.processes import started, told_by


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process with eight devices has found."""
    return told_by(started("tests.training.loop.meshes", tmp_path_factory.mktemp("meshes")))


@pytest.mark.slow
def test_losses_are_equal_on_any_mesh_and_across_a_resume_on_another(told):
    (_, one), *others = told["losses"]
    assert one[-1][1] < one[0][1]
    for (mesh, _, _), (divided, found) in zip(MESHES[1:], others, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-4, err_msg=mesh)
        assert divided == bool(mesh)
    np.testing.assert_allclose(told["resumed"], one[2:], rtol=1e-4)


def gathered_shapes(text):
    """Shapes of all results of all-gathers in a compiled program."""
    lines = re.findall(r"= (\(?.*?\)?) all-gather(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


@pytest.mark.slow
def test_fsdp_gathers_parameters_and_never_the_batch(told):
    shapes = gathered_shapes(told["compiled"]["text"])
    assert shapes
    # Float activations of the whole batch would have 64 rows of 64 tokens, or 64 · 64 of them.
    assert not [shape for shape in shapes if math.prod(shape) >= 64 * 64 * MODEL.hidden_size]
    # A layer's weights, the embedding and the head, each at most a few times, and in the loop once for all.
    layer = 4 * MODEL.hidden_size * (MODEL.ffn_size * 3 + 2 * 64 + 2 * 32)
    ends = 2 * 4 * MODEL.vocab_size * MODEL.hidden_size
    assert sum(4 * math.prod(shape) for shape in shapes) < 4 * (layer + ends)
    # One device's share of the rows: of every activation that a layer makes 1/8.
    whole = 64 * 64 * 4 * (MODEL.ffn_size * 3 + MODEL.hidden_size * 8 + MODEL.vocab_size * 3)
    assert told["compiled"]["temporary"] < whole / 8 * 2 + 4 * (layer + ends)


@pytest.mark.slow
def test_a_folder_is_read_onto_a_mesh_and_its_importance_measured_there(told):
    assert len({digest for *_, digest, _ in told["read"]}) == 2
    for weights, dtype, divided, _, away in told["read"]:
        assert divided
        assert dtype == {"f32": "float32", "bf16": "bfloat16"}[weights]
        assert away < (0.05 if dtype == "bfloat16" else 1e-7)


@pytest.mark.slow
def test_devices_divide_the_matrices_of_a_shape(told):
    for name, value in orthogonal(views(gradients(0))).items():
        np.testing.assert_allclose(told["muon"]["found"][name], value, atol=1e-5)
    # Five matrices of 16 x 48 are eight with padding: two for each of four devices.
    assert "f32[2,16,48]" in told["muon"]["text"]


@pytest.mark.slow
def test_losses_of_widths_on_a_mesh_are_those_of_one_device(told):
    one, four = told["widths"]
    assert one[0] == 4 * four[0] == 1
    np.testing.assert_allclose(four[1:3], one[1:3], atol=2e-5)
    np.testing.assert_allclose(four[3], one[3], atol=0.01 * np.sum(one[3][0]))


def test_a_mesh_is_read_from_text():
    assert MeshShape.parse("") == MeshShape()
    assert MeshShape.parse("data=2, tensor=4") == MeshShape(data=2, tensor=4)
    for wrong in ("rows=2", "data", "data=x", "fsdp=0", "data=-1"):
        with pytest.raises(ConfigError, match="mesh"):
            MeshShape.parse(wrong)


def test_a_mesh_must_fit_devices_rows_and_the_model():
    assert make_mesh(MeshShape(), 4).axis_names == AXES
    with pytest.raises(ConfigError, match="--cpu-devices makes more"):
        make_mesh(MeshShape(data=4096), 4096)
    with pytest.raises(ConfigError, match="there are"):
        make_mesh(MeshShape(fsdp=64, tensor=64), 64)
    for sizes, message in (
        ((1, 5, 1), "fsdp=5 does not divide the model's width of"),
        ((1, 1, 3), "tensor=3 does not"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_divisible(SMOKE.model, AbstractMesh(sizes, AXES))


def test_parameters_are_divided_by_their_names():
    mesh = AbstractMesh((2, 4, 3), AXES)
    for name, shape, spec in (
        ("final_norm.scale", (8,), ()),
        ("head", (6, 8), ("tensor", "fsdp")),
        ("layers.0.attn.q", (6, 5, 8), ("tensor", None, "fsdp")),
        ("layers.0.attn.k", (7, 8), (None, "fsdp")),
        ("layers.0.attn.v", (6, 6), ("tensor", None)),
        ("stacks.0.attn.q", (12, 6, 5, 8), (None, "tensor", None, "fsdp")),
        ("stacks.0.ffn_norm.scale", (12, 8), ()),
        ("stacks.0.attn.q.left", (12, 6, 5, 4), (None, "tensor", None, None)),
        ("stacks.0.attn.q.right", (12, 6, 8), (None, None, "fsdp")),
    ):
        assert tuple(spec_of(name, shape, mesh)) == spec, name


def test_a_group_needs_its_coordinator():
    start_process_group(None, None, None)
    for coordinator in (None, "none"):
        with pytest.raises(ConfigError, match="--coordinator"):
            start_process_group(coordinator, 2, 0)


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "group"),
    [
        ({}, False),
        ({**STEP, "SLURM_NTASKS": "16"}, True),
        ({**STEP, "SLURM_NTASKS": "1"}, False),
        # The shell of an allocation, whose tasks are started by srun.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_ML_PLATFORM": "JAX"}, True),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_SKIP_MDS_QUERY": "1"}, False),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_ML_PLATFORM": "JAX", "TPU_WORKER_HOSTNAMES": "a"}, False),
    ],
)
def test_a_cluster_starts_its_group(environment, group, monkeypatch):
    # JAX has set one of TPU's here.
    monkeypatch.setattr("os.environ", environment)
    started = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *given: started.append(given))
    start_process_group(None, None, None)
    assert started == [(None, None, None)] * group
    # Said otherwise, its environment is not asked.
    start_process_group("none", None, None)
    start_process_group("host:1", 2, 0)
    assert started[group:] == [("host:1", 2, 0)]


def test_a_cluster_whose_processes_are_not_found_is_told_of(monkeypatch):
    for name, value in {**STEP, "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)

    def missing(*given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", missing)
    with pytest.raises(ConfigError, match=r"environment names: coordinator_address.*--coordinator none"):
        start_process_group(None, None, None)
