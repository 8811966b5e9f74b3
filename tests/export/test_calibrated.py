"""Bundles calibrated for integer prefill: what of them programs can do without, and what must be said."""

import dataclasses

import pytest
from click.testing import CliRunner

from export.folder import ProgramKind, finish
from export.quantized import left_out
from export.signatures import ExportPlan
from export.subject import read_subject
from jaxllm.bundle.prefill import prefill_parts
from jaxllm.errors import ConfigError
from jaxllm.program_folder.manifest import Manifest
from serving.cli import cli
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "tiny.jaxllm"
    return write_tiny_bundle(path, "int8", params=outlying(), parts=prefill_parts(calibrated()))


def test_products_in_integers_are_refused_without_their_shadow(bundle, tmp_path):
    subject = read_subject(bundle)
    assert left_out(subject, "int8", without_shadow=False) == ()
    assert left_out(dataclasses.replace(subject, calibrated=False), "w8a8", without_shadow=False) == ()
    with pytest.raises(
        ConfigError, match=r"calibrated for integer prefill .*--precision int8, .*--without-shadow"
    ):
        left_out(subject, "w8a8", without_shadow=False)
    # Who insists has it on record.
    plan = ExportPlan(context_tokens=64, chunk_tokens=(16,), cache_tokens=(), without_shadow=True)
    (tmp_path / "model.tflite").write_bytes(b"")
    finish(
        tmp_path,
        subject,
        plan,
        plan.signatures(100, lambda _: "model.tflite"),
        ProgramKind(
            format="tflite", precision="w8a8", cache_dtype="float32", platforms=("cpu",), holds_weights=True
        ),
    )
    assert Manifest.read(tmp_path).left_out == ("the calibration of integer prefill, and its shadow",)


def test_the_command_refuses_before_it_reads_a_text(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("export.extras.require_format", lambda kind: None)
    out = tmp_path / "out"
    asked = [str(bundle), "-o", str(out), "--format", "tflite", "--precision", "w8a8"]
    done = CliRunner().invoke(cli, ["export", *asked, "--calibration-text", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError)
    assert "--without-shadow" in str(done.exception)
    assert not out.exists()
