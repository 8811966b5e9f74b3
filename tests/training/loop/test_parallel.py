"""Meshes and process groups: the same losses however the work is divided."""

import dataclasses
import json
import socket
import subprocess
import sys

import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.errors import ConfigError
from jaxllm.training.loop.parallel import (
    AXES,
    MeshShape,
    make_mesh,
    require_divisible,
    spec_of,
    start_process_group,
)
from tests.training.jobs import SMOKE, train

RECIPE = dataclasses.replace(SMOKE, batch=8, steps=5, checkpoint_steps=5, log_steps=1)

# One process: a mesh over 8 devices of this machine. Several: 2 devices each, and a group.
RUN = """
import dataclasses, json, sys
from pathlib import Path
import jax
folder, mesh, devices, port, processes, process, accumulate = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
from jaxllm.training.loop.parallel import MeshShape, make_mesh, start_process_group
if int(processes) > 1:
    start_process_group(f"127.0.0.1:{port}", int(processes), int(process))
from tests.training.loop.test_parallel import RECIPE
from tests.training.jobs import train
recipe = dataclasses.replace(RECIPE, accumulate=int(accumulate))
seen = []
mesh = make_mesh(MeshShape.parse(mesh), recipe.batch // recipe.accumulate)
state = train(recipe, Path(folder), seen.append, mesh=mesh)
divided = sum(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in state.params.values())
losses = [[each.loss, each.gradient_norm] for each in seen]
found = {"losses": losses, "held_out": seen[-1].held_out_loss, "devices": mesh.size, "divided": divided}
print(json.dumps(found))
"""


def start(folder, mesh="", devices=8, port=0, processes=1, process=0, accumulate=1):
    arguments = map(str, (folder, mesh, devices, port, processes, process, accumulate))
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result_of(process):
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    seen = []
    train(RECIPE, tmp_path_factory.mktemp("alone"), seen.append)
    return [[each.loss, each.gradient_norm] for each in seen], seen[-1].held_out_loss


def assert_same_losses(found, alone):
    np.testing.assert_allclose(found["losses"], alone[0], rtol=1e-4)
    np.testing.assert_allclose(found["held_out"], alone[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate"), [("", 1), ("data=2,fsdp=2,tensor=2", 1), ("fsdp=4,tensor=2", 2)]
)
def test_eight_devices_have_the_losses_of_one(tmp_path, alone, mesh, accumulate):
    found = result_of(start(tmp_path, mesh, accumulate=accumulate))
    assert found["devices"] == 8
    assert_same_losses(found, alone)
    assert bool(found["divided"]) == ("tensor" in mesh)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["", "data=1,fsdp=4"])
def test_two_processes_have_the_losses_of_one(tmp_path, alone, mesh):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = [start(tmp_path, mesh, 2, port, 2, process) for process in range(2)]
    for found in [result_of(process) for process in group]:
        assert found["devices"] == 4
        assert_same_losses(found, alone)


def test_a_mesh_is_read_from_text():
    assert MeshShape.parse("") == MeshShape()
    assert MeshShape.parse("data=2, tensor=4") == MeshShape(data=2, tensor=4)
    for wrong in ("rows=2", "data", "data=x", "fsdp=0", "data=-1"):
        with pytest.raises(ConfigError, match="mesh"):
            MeshShape.parse(wrong)


def test_a_mesh_must_fit_devices_and_rows():
    assert make_mesh(MeshShape(), 4).axis_names == AXES
    with pytest.raises(ConfigError, match="--cpu-devices makes more"):
        make_mesh(MeshShape(data=4096), 4096)
    with pytest.raises(ConfigError, match="there are"):
        make_mesh(MeshShape(fsdp=64, tensor=64), 64)


def test_parameters_are_divided_by_their_names():
    mesh = AbstractMesh((2, 4, 3), AXES)
    parameters = {
        "final_norm.scale": (8,),
        "head": (6, 8),
        "layers.0.attn.q": (6, 5, 8),
        "layers.0.attn.k": (7, 8),
        "layers.0.attn.v": (6, 6),
        "stacks.0.attn.q": (12, 6, 5, 8),
        "stacks.0.ffn_norm.scale": (12, 8),
        "stacks.0.attn.q.left": (12, 6, 5, 4),
        "stacks.0.attn.q.right": (12, 6, 8),
    }
    assert [tuple(spec_of(*each, mesh)) for each in parameters.items()] == [
        (),
        ("tensor", "fsdp"),
        ("tensor", None, "fsdp"),
        (None, "fsdp"),
        ("tensor", None),
        (None, "tensor", None, "fsdp"),
        (),
        (None, "tensor", None, None),
        (None, None, "fsdp"),
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 5, 1), "fsdp=5 does not divide the model's width of"),
        ((1, 1, 3), "tensor=3 does not divide the model's"),
    ],
)
def test_a_mesh_must_divide_the_model(sizes, message):
    with pytest.raises(ConfigError, match=message):
        require_divisible(SMOKE.model, AbstractMesh(sizes, AXES))


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
