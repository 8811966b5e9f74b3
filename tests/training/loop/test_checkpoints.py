"""kill -9 at every change of a run's checkpoints, deletions and renames included: the run goes on."""

import contextlib
import dataclasses
import errno
import hashlib
import http.server
import json
import multiprocessing
import shutil
import signal
import socket
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from jaxllm.errors import CheckpointError
from jaxllm.training.decoders import export_best, pretrain
from jaxllm.training.loop import checkpoints as module
from jaxllm.training.loop.checkpoints import Checkpoints, TrainState, read_best
from jaxllm.training.loop.parallel import MeshShape, make_mesh, spec_of
from jaxllm.training.loop.run_files import keep_checkpoints_at
from tests.faults import FailingDevice, KillingDevice
from tests.training.tiny_runs import SMOKE, join, one_device, quiet, started_group, told_by

# The first is the best and stays, the second is deleted.
LOSSES = (1.0, 4.0, 3.0, 2.0)
LAST = len(LOSSES)

CHANGES = {"mkdir", "rmdir", "rename", "replace", "unlink", "remove", "write", "link", "truncate"}


def state_of(step):
    return TrainState(jnp.int32(step), {"w": jnp.full((3, 2), step, jnp.float32)}, {"m": jnp.float32(step)})


def abstract():
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state_of(0)
    )


def save_the_rest(folder, last=LAST):
    """What a run does: from the newest checkpoint to the last step."""
    with Checkpoints(folder, resumes=True) as checkpoints:
        done, state = checkpoints.newest(abstract()) or (0, state_of(0))
        assert int(state.step) == done
        np.testing.assert_array_equal(state.params["w"], np.full((3, 2), done))
        for step in range(done + 1, last + 1):
            checkpoints.save(state_of(step), LOSSES[step - 1])
    return done


class _AtChanges(KillingDevice):
    """Counts what changes files: a kill before an operation that reads is one before the next change."""

    def __init__(self, folder, at):
        super().__init__(folder, at)
        self.names, self._lock = [], threading.Lock()

    def _count(self, name, where):
        # Several threads write.
        with self._lock:
            if name in CHANGES:
                self.names.append(name)
                super()._count(name, where)


def _die(folder, at, ours):
    with _AtChanges(folder, at) as device:
        save_the_rest(folder)
    ours.send(device.names)


def killed(folder, at=None):
    """Saves in a process that is killed at a change; the names of all changes where it was not."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    theirs, ours = server.Pipe(duplex=False)
    child = server.Process(target=_die, args=(folder, at, ours))
    child.start()
    ours.close()
    child.join()
    # Threads write in any order: a run may have a change less than the one that was counted, and end.
    assert child.exitcode in ((0,) if at is None else (0, -signal.SIGKILL))
    return [] if child.exitcode else theirs.recv()


def check_goes_on(folder):
    save_the_rest(folder)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.best() == (1, 1.0)
        # Nothing is left of those that were half written or half deleted; the second may be there whole.
        names = {path.name for path in folder.iterdir()}
        assert {"1", "3", "4"} <= names <= {"1", "2", "3", "4"}
        for step in map(int, names):
            assert int(checkpoints.restore(step, abstract()).step) == step


@pytest.fixture
def begun(tmp_path):
    """A run before its last save, at which a checkpoint is written and another one deleted."""
    save_the_rest(tmp_path / "begun", last=LAST - 1)

    def copy(name):
        return shutil.copytree(tmp_path / "begun", tmp_path / name)

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("lane", range(4))
def test_a_kill_at_any_change(begun, lane):
    changes = killed(begun("whole"))
    assert {"rename", "replace", "unlink", "rmdir", "mkdir"} <= set(changes)
    ended = []
    for at in range(1 + lane, len(changes), 4):
        folder = begun(str(at))
        ended += killed(folder, at)[:1]
        check_goes_on(folder)
    assert len(ended) <= 1


def test_a_kill_at_a_change_of_each_kind(begun):
    changes = killed(begun("whole"))
    for name in ("rename", "replace", "unlink"):
        # A checkpoint is being finished, renamed, or deleted.
        at = [number for number, each in enumerate(changes, start=1) if each == name][-1]
        folder = begun(name)
        killed(folder, at)
        check_goes_on(folder)


def test_half_of_a_checkpoint_is_ignored_and_removed(tmp_path, caplog):
    """What other programs, and buckets without renames, leave of one that they delete."""
    save_the_rest(tmp_path)
    for step, gone in ((2, "metrics"), (5, "default/_METADATA"), (6, "metrics/metrics")):
        shutil.copytree(tmp_path / "4", tmp_path / str(step))
        path = tmp_path / str(step) / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    # One that looks on changes nothing.
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best() == (1, 1.0)
        assert checkpoints.latest() == 4
    assert (tmp_path / "2").exists()
    check_goes_on(tmp_path)
    assert caplog.text.count("is not a whole checkpoint") == 3


@pytest.mark.parametrize("damage", ["data", "metrics"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage):
    save_the_rest(tmp_path)
    for file in (tmp_path / "4").rglob("*"):
        if file.is_file() and ("metrics" in file.parts) == (damage == "metrics"):
            file.write_bytes(file.read_bytes()[:-1])
    assert save_the_rest(tmp_path) == 3
    assert f"{tmp_path}/4" in caplog.text
    check_goes_on(tmp_path)


def test_nothing_is_removed_because_of_an_error_that_may_pass(tmp_path):
    save_the_rest(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    with FailingDevice(tmp_path, at=None) as device:
        device.fail(errno.EMFILE)
        with pytest.raises(CheckpointError, match="cannot list"):
            Checkpoints(tmp_path, resumes=True)
    with Checkpoints(tmp_path, resumes=True) as checkpoints, FailingDevice(tmp_path, at=None) as device:
        device.fail(errno.EMFILE)
        with pytest.raises(CheckpointError, match=r"Too many open files|cannot list"):
            checkpoints.newest(abstract())
    assert {path.name for path in tmp_path.iterdir()} == names


def test_nothing_is_removed_where_none_can_be_read(tmp_path):
    save_the_rest(tmp_path)
    other = dataclasses.replace(abstract(), params={"v": abstract().params["w"]})
    with Checkpoints(tmp_path, resumes=True) as checkpoints:
        with pytest.raises(CheckpointError, match="remove it to go on"):
            checkpoints.newest(other)
        assert checkpoints.latest() == 4
    for file in tmp_path.rglob("*"):
        if file.is_file() and "metrics" not in file.parts:
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove it to go on"):
        save_the_rest(tmp_path)


# Checkpoints in buckets: which stay, on which mesh they are read, and what damage is refused.
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


def test_a_service_that_is_not_there_is_an_error(monkeypatch):
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
    for process in started_group("tests.training.loop.test_checkpoints"):
        assert told_by(process)
    shards = {name for name in service.objects if "/3/params/layers.0.attn.q/c/" in name}
    assert len(shards) == 4
    state, step, _ = read_best(URL, shapes_on(one_device()))
    assert step == 1
    assert_is_step(state, 1)
    with Checkpoints(URL) as checkpoints:
        assert_is_step(checkpoints.restore(3, shapes_on(one_device())), 3)


@pytest.mark.slow
def test_a_run_resumes_from_a_bucket_to_the_same_bits(tmp_path, service):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Story {n}: a cat sat on {n} mats." for n in range(400)))
    recipe = dataclasses.replace(SMOKE, steps=4, checkpoint_steps=2, held_out_share=0.1)
    whole = pretrain(recipe, quiet(tmp_path / "local"), texts=[text])
    run = tmp_path / "run"
    keep_checkpoints_at(run, "s3://bucket/run")
    pretrain(dataclasses.replace(recipe, steps=2), quiet(run), texts=[text])
    resumed = load_file(pretrain(recipe, quiet(run), texts=[text]) / "model.safetensors")
    assert not (run / "checkpoints").exists()
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert export_best(run) == run / "hf"


class FakeS3(http.server.ThreadingHTTPServer):
    """A server on a free port of this machine; `objects` are by "bucket/key"."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects, self.requests, self.page = {}, [], 4

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def running():
    with FakeS3() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _name(self):
        return unquote(urlsplit(self.path).path.lstrip("/"))

    def _answer(self, status, body=b"", **headers):
        self.server.requests.append((self.command, self._name(), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._list(query)
        found = self.server.objects.get(self._name())
        if found is None:
            return self._answer(404)
        headers = {"ETag": f'"{hashlib.sha256(found).hexdigest()}"'}
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            part = found[int(first) : int(last) + 1 if last else None]
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(found)}"
            return self._answer(206, part, Content_Range=place, **headers)
        return self._answer(200, found, **headers)

    def do_HEAD(self):
        self.do_GET()

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self._name()] = body
        self._answer(200, ETag=f'"{hashlib.sha256(body).hexdigest()}"')

    def do_DELETE(self):
        self.server.objects.pop(self._name(), None)
        self._answer(204)

    def _list(self, query):
        """A page of keys; the token of the next one is the last key."""
        bucket = self._name().strip("/") + "/"
        prefix = bucket + query.get("prefix", [""])[0]
        after = bucket + query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = sorted(each for each in list(self.server.objects) if each.startswith(prefix) and each > after)
        page = [each.removeprefix(bucket) for each in keys[: self.server.page]]
        rows = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in page)
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        told = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        body = f"<ListBucketResult>{told}{rows}</ListBucketResult>".encode()
        self._answer(200, body, Content_Type="application/xml")

    def log_message(self, *_):
        """Prints nothing."""
