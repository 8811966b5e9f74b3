"""Checkpoints in buckets: which stay, on which mesh they are read, and what damage is refused."""

import dataclasses
import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from jaxllm.errors import CheckpointError
from jaxllm.training.loop import checkpoints as module
from jaxllm.training.loop.checkpoints import Checkpoints, TrainState, read_best
from jaxllm.training.loop.parallel import MeshShape, make_mesh, spec_of
from jaxllm.training.loop.run_files import keep_checkpoints_at
from jaxllm.training.pretrain.run import export_best, pretrain
from tests.training.jobs import SMOKE, one_device
from tests.training.loop.fake_s3 import running
from tests.training.processes import join, started_group, told_by
from tests.training.tiny_runs import quiet

SERVICE = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "eu-central-1"}
URL = "s3://bucket/run/checkpoints"


@pytest.fixture
def service(monkeypatch):
    with running() as server:
        for name, value in {**SERVICE, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        yield server


def state_on(mesh, step):
    """A state of some shapes and types; its values follow from the step."""

    def put(name, value):
        place = NamedSharding(mesh, spec_of(name, value.shape, mesh))
        return jax.make_array_from_callback(value.shape, place, lambda index: value[index])

    matrix = np.arange(128, dtype=np.float32).reshape(8, 16) * step
    params = {
        "layers.0.attn.q": put("layers.0.attn.q", matrix),
        "zeros": put("zeros", np.zeros(3, np.float32)),
    }
    half = put("half", np.asarray(matrix, jnp.bfloat16))
    return TrainState(step=put("step", np.int32(step)), params=params, optimizer=(half,))


def shapes_on(mesh):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_on(mesh, 1)
    )


def assert_is_step(state, step):
    for found, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(state_on(one_device(), step)), strict=True
    ):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_the_last_two_and_the_best_stay(service, monkeypatch):
    # A shard of several objects.
    monkeypatch.setattr(module, "_MOST_CHUNK_BYTES", 128)
    mesh = one_device()
    # What a killed process left of a step is written over.
    service.objects["bucket/run/checkpoints/3/params/zeros/c/7"] = b"left"
    with Checkpoints(URL) as checkpoints:
        assert checkpoints.latest() is None
        for step, loss in enumerate([0.5, 2.0, 0.0, 1.0, None], start=1):
            checkpoints.save(state_on(mesh, step), loss)
    with Checkpoints(URL) as checkpoints:
        assert checkpoints.latest() == 5
        assert checkpoints.best() == (3, 0.0)
        for step in (3, 4, 5):
            assert_is_step(checkpoints.restore(step, shapes_on(mesh)), step)
    steps = {name.split("/")[3] for name in service.objects} - {"done"}
    assert steps == {"3", "4", "5"}
    assert "bucket/run/checkpoints/3/params/zeros/c/7" not in service.objects
    state, step, loss = read_best(URL, shapes_on(mesh))
    assert_is_step(state, 3)
    assert (step, loss) == (3, 0.0)
    # Zeros are written, too.
    assert "bucket/run/checkpoints/5/params/zeros/c/0" in service.objects
    # What a killed process left behind the last one is removed where the run resumes.
    whole = set(service.objects)
    service.objects["bucket/run/checkpoints/7/zeros/c/0"] = b"left"
    with Checkpoints(URL):
        assert set(service.objects) > whole
    with Checkpoints(URL, resumes=True) as checkpoints:
        assert checkpoints.latest() == 5
    assert set(service.objects) == whole


def test_what_is_damaged_or_of_another_run_is_refused(service):
    mesh = one_device()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        read_best(URL, shapes_on(mesh))
    with Checkpoints(URL) as checkpoints:
        checkpoints.save(state_on(mesh, 1), 1.0)
    name = "bucket/run/checkpoints/1/params/layers.0.attn.q/c/0/0"
    whole = service.objects[name]

    def restored(abstract):
        with Checkpoints(URL) as checkpoints:
            return checkpoints.restore(1, abstract)

    other = shapes_on(mesh)
    other.params["zeros"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=other.params["zeros"].sharding)
    with pytest.raises(CheckpointError, match="no params/zeros of the shape and type"):
        restored(other)
    with pytest.raises(CheckpointError, match="no optimizer/0"):
        restored(dataclasses.replace(other, params=shapes_on(mesh).params, optimizer=()))
    service.objects[name] = bytes([whole[0] ^ 1]) + whole[1:]
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint s3://.*/1: .*remove it"):
        restored(shapes_on(mesh))
    del service.objects[name]
    with pytest.raises(CheckpointError, match=r"\d of its \d objects are there"):
        restored(shapes_on(mesh))
    service.objects[name] = whole
    assert_is_step(restored(shapes_on(mesh)), 1)


def test_a_service_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(module, "_RETRIES", {"max_retries": 1})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {**SERVICE, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="cannot list the checkpoints at s3://bucket/run"):
        Checkpoints(URL)


def main(port, process):
    """One process of two, with two devices."""
    join(port, process, 2)
    mesh = make_mesh(MeshShape(data=1, fsdp=2, tensor=2), 2)
    with Checkpoints(URL) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state_on(mesh, step), float(step))
    with Checkpoints(URL) as checkpoints:
        state = checkpoints.restore(3, shapes_on(mesh))
    same = jax.tree.map(lambda one, other: bool(jnp.array_equal(one, other)), state, state_on(mesh, 3))
    print(json.dumps(all(jax.tree.leaves(same))))


@pytest.mark.slow
def test_two_processes_write_their_shards_and_one_reads_them(service):
    for process in started_group("tests.training.loop.test_s3_checkpoints"):
        assert told_by(process)
    shards = {name for name in service.objects if "/3/params/layers.0.attn.q/c/" in name}
    assert len(shards) == 4
    state, step, _ = read_best(URL, shapes_on(one_device()))
    assert step == 1
    assert_is_step(state, 1)
    with Checkpoints(URL) as checkpoints:
        assert_is_step(checkpoints.restore(3, shapes_on(one_device())), 3)


@pytest.fixture
def bucket(monkeypatch):
    """An emulated bucket of Google's, if there is the emulator."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, f"http://localhost:{port}")
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "url"), [("service", "s3://bucket/run"), ("bucket", "gs://bucket/run")])
def test_a_run_resumes_from_a_bucket_to_the_same_bits(tmp_path, request, place, url):
    request.getfixturevalue(place)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Story {n}: a cat sat on {n} mats." for n in range(400)))
    recipe = dataclasses.replace(SMOKE, steps=4, checkpoint_steps=2, held_out_share=0.1)
    whole = pretrain(recipe, quiet(tmp_path / "local"), texts=[text])
    run = tmp_path / "run"
    keep_checkpoints_at(run, url)
    pretrain(dataclasses.replace(recipe, steps=2), quiet(run), texts=[text])
    resumed = load_file(pretrain(recipe, quiet(run), texts=[text]) / "model.safetensors")
    assert not (run / "checkpoints").exists()
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert export_best(run) == run / "hf"
