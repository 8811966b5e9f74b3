"""Tests which parts of a bundle are exported, in which numbers, its calibration of integer prefill among
them; and that the table of programs and formats in the documents is what exporters hold and refuse."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle, lay_experts_apart
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.contents import CONTENTS, require_contents, require_family
from jaxllm.export.folder import finish
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import LEFT
from jaxllm.export.quantized import ROWS, StaticProduct, left_out, with_shadow
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.int8_prefill.shadow import NARROW
from jaxllm.models.lora import LoraConfig, merge
from jaxllm.quant import dequantize
from tests.export.models import write_elastic
from tests.int8_prefill.calibrated import calibrated, outlying
from tests.models.test_lora import random_adapter
from tests.tiny import TINY, write_tiny_bundle
from tests.tiny_encdec import TINY_T5

MIXTURE = dataclasses.replace(
    TINY, model_type="mixtral", attention_windows=(), experts=3, experts_per_token=2, expert_ffn_size=32,
    sparse_layers=(True, True),
)  # fmt: skip


def test_experts_that_lie_apart_go_out_together(tmp_path):
    """A program has all of them in memory, however the bundle stores them."""
    together, apart = write_tiny_bundle(tmp_path / "together", "int8", cfg=MIXTURE), tmp_path / "apart"
    with Bundle.open(together) as bundle:
        lay_experts_apart(apart, bundle, np.full((2, 3), 8))
    wanted, got = read_subject(together).arrays, read_subject(apart).arrays
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array)


def test_adapters_are_at_half_precision_where_nothing_is_lost(subject, tmp_path):
    other = read_subject(write_elastic(tmp_path / "tiny.jaxllm", scaling=0.3), levels=(40,))
    sides = [name for name in subject.arrays if name.startswith("level_40.")]
    for name in sides:
        assert subject.arrays[name].dtype == np.float16, name
        # Scaled by three tenths, left sides are halves no more.
        assert other.arrays[name].dtype == (np.float32 if name.endswith(LEFT) else np.float16), name
        ratio = np.float32(0.3) / np.float32(0.5) if name.endswith(LEFT) else 1
        wide = subject.arrays[name].astype(np.float32)
        np.testing.assert_allclose(other.arrays[name], wide * ratio, rtol=1e-6, err_msg=name)
    assert sides


def test_int8_weights_come_as_the_floats_that_they_stand_for_and_narrower_ones_not(tmp_path):
    path = write_tiny_bundle(tmp_path / "eight.jaxllm", "int8")
    arrays = read_subject(path).arrays
    with Bundle.open(path) as bundle:
        for name, weight in bundle.load().items():
            np.testing.assert_array_equal(arrays[name], dequantize(weight, jnp.float32), err_msg=name)
    with pytest.raises(ConfigError, match=r"int4 weights.*native-only width"):
        read_subject(write_tiny_bundle(tmp_path / "four.jaxllm", "int4"))
    with pytest.raises(CheckpointError, match="jaxllm prepare"):
        read_subject(tmp_path)


def test_an_adapter_is_folded_in_and_makes_another_model(tmp_path):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm")
    lora = LoraConfig(rank=2, alpha=4, targets=("attn.q", "ffn.down"))
    adapter = random_adapter(TINY, lora, 0)
    write_adapter(tmp_path / "adapter", TINY, lora, adapter)
    plain, adapted = read_subject(path), read_subject(path, adapter=tmp_path / "adapter")
    assert plain.model != adapted.model
    params = {name: jnp.asarray(value) for name, value in plain.arrays.items()}
    wanted = merge(params, adapter, lora.scaling)
    for name, array in adapted.arrays.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-6, err_msg=name)
    assert (adapted.arrays["layers.0.attn.q"] != plain.arrays["layers.0.attn.q"]).any()


# A calibration of integer prefill: what programs take of it, and what must be said


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
    signatures = plan.signatures(100, lambda _: "model.tflite")
    finish(tmp_path, subject, plan, signatures, format="tflite", precision="w8a8", platforms=("cpu",))
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


# Formats

PAGE = Path("docs/guides/export.md")
# Attribute of `Contents` -> the row of the table.
TITLES = {
    "blocks": "decode of several tokens, with sampling",
    "verified": "verification of drafts",
    "levels": "levels, with their recovery adapters",
    "short_caches": "short caches",
    "masks": "an attention mask as an input",
    "npu": "embedder, auxiliary model and layers apart, for an NPU",
    "stages": "stages of prefill for two processors (w8a8)",
    "encoders": "encoder-decoders (not w8a8)",
    "tiny_lm": "the tiny LM, which plans calls",
    "adapters": "adapters as an input (decoders alone)",
    "codecs": "codecs of contexts (decoders alone)",
    "caches": "narrow caches (decoders alone)",
    "precisions": "`--precision`",
}


def cell(value):
    if isinstance(value, tuple):
        return ", ".join(value) or "no"
    return {True: "yes", False: "no", "": "no"}.get(value, str(value))


def as_markdown():
    """Programs and formats, as Markdown."""
    lines = [["", *(f"`{name}`" for name in CONTENTS)], ["---"] * (1 + len(CONTENTS))]
    lines.append(["prefill of a chunk, decode of a token", *("yes" for _ in CONTENTS)])
    for name, title in TITLES.items():
        lines.append([title, *(cell(getattr(each, name)) for each in CONTENTS.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_is_up_to_date():
    written = PAGE.read_text(encoding="utf-8").split("<!-- contents -->\n")[1]
    assert written.split("<!-- end of contents -->")[0].strip() == as_markdown()


def test_what_a_format_lacks_is_named():
    plan = ExportPlan(verify_tokens=(8,), block_tokens=4, cache_tokens=(16,))
    wanted = "--level, --verify-tokens, --block-tokens, --cache-tokens; leave them out"
    with pytest.raises(ConfigError, match=wanted):
        require_contents("litertlm", plan, levels=2)
    for kind in set(CONTENTS) - {"litertlm"}:
        require_contents(kind, plan, levels=2)


def test_encoder_decoders_that_formats_do_not_hold():
    with pytest.raises(ConfigError, match="litertlm format holds no programs of encoder-decoders"):
        require_family("litertlm", "f32", TINY_T5)
    with pytest.raises(ConfigError, match=r"w8a8 programs are not made of .*--precision int8"):
        require_family("tflite", "w8a8", TINY_T5)
    for kind in ("stablehlo", "tflite", "device"):
        require_family(kind, "f32", TINY_T5)
