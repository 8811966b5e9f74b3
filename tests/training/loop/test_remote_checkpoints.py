"""A run whose checkpoints are in an emulated bucket resumes from there, to the same parameters."""

import socket

import pytest

from jaxllm.training.pretrain.run import export_best
from tests.training.loop.resumed_runs import resumed_to_the_same_bits

pytest.importorskip("gcsfs")
emulator = pytest.importorskip("gcp_storage_emulator.server")


@pytest.fixture
def bucket(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
        monkeypatch.setenv(name, f"http://localhost:{port}")
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield "gs://bucket"
    server.stop()


@pytest.mark.slow
def test_a_run_resumes_from_a_bucket(tmp_path, bucket):
    run = resumed_to_the_same_bits(tmp_path, f"{bucket}/run")
    assert export_best(run) == run / "hf"
