"""Bundles calibrated for integer prefill: what their programs take of it, and what must be said."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.export.folder import ProgramKind, finish
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.quantized import ROWS, StaticProduct, left_out, with_shadow
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.shadow import NARROW
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrated") / "tiny.jaxllm"
    return write_tiny_bundle(path, "int8", params=outlying(), parts=prefill_parts(calibrated()))


def test_what_of_a_calibration_programs_do_not_have_is_said(bundle, tmp_path):
    subject = read_subject(bundle)
    assert left_out(subject, "w8a8", without_shadow=False) == ()
    merged = dataclasses.replace(subject, merged=True)
    with pytest.raises(
        ConfigError,
        match=r"calibrated for integer prefill without the adapter.*--precision int8, .*--without-shadow",
    ):
        left_out(merged, "w8a8", without_shadow=False)
    assert left_out(merged, "int8", without_shadow=False) == ()
    other = dataclasses.replace(subject, levels={40: subject.levels[100], **subject.levels})
    with pytest.raises(ConfigError, match=r"level 40 of tiny was not calibrated .*levels 100 were"):
        left_out(other, "w8a8", without_shadow=False)
    # Who insists has it on record.
    plan = ExportPlan(context_tokens=64, chunk_tokens=(16,), cache_tokens=(), without_shadow=True)
    (tmp_path / "model.tflite").write_bytes(b"")
    finish(
        tmp_path,
        subject,
        plan,
        plan.signatures(100, lambda _: "model.tflite"),
        ProgramKind(format="tflite", precision="w8a8"),
    )
    assert Manifest.read(tmp_path).left_out == ("the calibration of integer prefill, and its shadow",)


def test_calibration_outlives_the_bundle_and_rows_become_weights(bundle):
    subject = with_shadow(read_subject(bundle))
    calibration, wanted = subject.calibration, calibrated()
    assert calibration is not None
    np.testing.assert_array_equal(calibration.steps, wanted.steps)
    (layer,) = [at for at, each in enumerate(wanted.shadowed) if each]
    channels = wanted.channels[layer, NARROW]
    real = channels >= 0
    name = f"layers.{layer}.ffn.down"
    assert real.any()
    np.testing.assert_array_equal(
        subject.weights(100)[f"{name}{ROWS}"], wanted.rows[layer, NARROW][0][real].T
    )
    assert all(f"layers.{layer}." in each for each in subject.arrays if each.endswith(ROWS))


def test_a_static_product_is_that_of_floats_but_for_rounding():
    draw = np.random.default_rng(0)
    levels, scale, step = draw.integers(-127, 128, (24, 40)), np.float32(0.01), 0.05
    matrix, x = (levels * scale).astype(np.float32), draw.normal(size=(16, 40)).astype(np.float32)
    # Beyond 127 steps on both sides.
    x[:, 7] = 20 * np.where(np.arange(16) % 2, 1, -1)
    wanted, channels = x @ matrix.T, np.array([7], np.int32)
    clipped = np.clip(x, -128 * step, 127 * step)
    outputs = np.abs(clipped @ matrix.T).max(axis=0)
    scales = np.full(24, scale, np.float64) / outputs
    weights = {f"w{ROWS}": jnp.asarray(matrix[:, channels].astype(np.float16))}
    divided = jnp.asarray(matrix / outputs[:, None])
    # Rounding of inputs, of outputs, and of the row in half precision.
    most = step / 2 * np.abs(matrix).sum(axis=1) + outputs / 127 + 20 * 1.3 / 2**11
    for known, within in ((channels, 1.0), (np.zeros(0, np.int32), 3.0)):
        product = StaticProduct(step, outputs, known, scales).of("w", weights)
        off = np.abs(np.asarray(product(jnp.asarray(x), divided, -1)) - wanted) / most
        assert (off.max() <= 1) == (within == 1.0)
    assert off.max() > 3


def test_the_command_exports_a_calibrated_bundle_with_its_shadow_or_says_without(
    bundle, tmp_path, monkeypatch
):
    """What the exporter is given, for the converter lives elsewhere."""
    given = []
    monkeypatch.setattr("jaxllm.cli.export.require_format", lambda kind: None)
    monkeypatch.setattr("jaxllm.cli.export._export_tflite", lambda *of: given.append(of) or ["made"])
    (tmp_path / "text").write_text("the hello")
    asked = [str(bundle), "-o", str(tmp_path / "out"), "--format", "tflite", "--precision", "w8a8"]
    asked += ["--calibration-text", str(tmp_path / "text")]
    for more, said in (([], "made\n"), (["--without-shadow"], "without the calibration of integer prefill")):
        done = CliRunner().invoke(cli, ["export", *asked, *more])
        assert said in done.output, done
        assert given[-1][0].calibration is not None
