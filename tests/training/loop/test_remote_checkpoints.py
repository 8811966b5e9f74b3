"""A run whose checkpoints are in an emulated bucket resumes from there, to the same parameters."""

import dataclasses
import socket

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training.jobs import SMOKE
from tests.training.tiny_runs import ONE, SILENT
from training.loop.run_files import keep_checkpoints_at
from training.pretrain.run import PretrainTexts, export_best, pretrain

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
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Story {n}: a cat sat on {n} mats." for n in range(400)))
    options = {"texts": PretrainTexts(train=[text]), "mesh_shape": ONE, "monitoring": SILENT}
    model = dataclasses.replace(SMOKE.model, vocab_size=288)
    recipe = dataclasses.replace(SMOKE, model=model, steps=4, checkpoint_steps=2, held_out_share=0.1)
    whole = pretrain(recipe, tmp_path / "local", **options)
    run = tmp_path / "run"
    keep_checkpoints_at(run, f"{bucket}/run")
    pretrain(dataclasses.replace(recipe, steps=2), run, **options)
    resumed = load_file(pretrain(recipe, run, **options) / "model.safetensors")
    assert not (run / "checkpoints").exists()
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert export_best(run) == run / "hf"
