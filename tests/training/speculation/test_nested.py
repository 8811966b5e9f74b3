"""Nested weights calibrated on a text: a bundle of the same size, whose high planes are a better model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.decoder import forward_documents
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.quant import QArray, from_blocks
from jaxllm.quant.blocks import BlockedArray
from jaxllm.quant.parts import high_plane
from jaxllm.training.calibration import BundleOutput, NestedRecipe, text_tokens
from jaxllm.training.speculation.nested import calibrate_nested
from tests.tiny import TINY, random_params, tiny_params, write_tiny_bundle, write_tiny_folder

RECIPE = NestedRecipe(tokens=2048, row_tokens=64)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).integers(97, 105, (800, 5)).astype(np.uint8)
    path.write_text(" ".join(bytes(word).decode() for word in words))
    return path


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The folder, its bundle, the calibrated one, and what was found."""
    folder = tmp_path_factory.mktemp("nested")
    source = write_tiny_folder(folder / "hf")
    prepare(source, folder / "plain.jaxllm", weights="int8-nested", name="hf")
    facts = calibrate_nested(RECIPE, source, BundleOutput(folder / "better.jaxllm"), texts=[text])
    return source, folder / "plain.jaxllm", folder / "better.jaxllm", facts


def planes(path) -> tuple[Params, Params]:
    """Parameters of both planes, and of the high planes alone."""

    def read(each, plane):
        if isinstance(each, BlockedArray):
            each = from_blocks(plane(each))
        return jax.tree.map(jnp.array, each)

    with Bundle.open(path) as bundle:
        stored = {name: bundle.stored(name) for name in bundle.layout.tensors}
        both, high = (
            {name: read(each, plane) for name, each in stored.items()}
            for plane in (lambda each: each, high_plane)
        )
    return both, high


def test_high_planes_are_nearer_to_the_floats(made, text):
    """In the model's own outputs on the text, which no sum of the calibration sees."""
    _, plain, better, facts = made
    with Bundle.open(plain) as bundle:
        tokens = jnp.array(text_tokens(bundle, 2048, [text]), jnp.int32).reshape(-1, 64)
    exact = forward_documents(jax.tree.map(jnp.asarray, dict(tiny_params())), tokens, cfg=TINY)

    def errors(path):
        return [
            float(jnp.mean(jnp.square(forward_documents(each, tokens, cfg=TINY) - exact)))
            for each in planes(path)
        ]

    (both, high), (both_after, high_after) = errors(plain), errors(better)
    assert high_after < 0.8 * high
    assert both_after < both
    assert facts["high_plane_error"] < facts["high_plane_error_held_out"] < 0.9
    assert facts["tokens"] == 2048
    assert 0.02 < facts["moved"] < 0.3


def test_sizes_scales_and_the_rest_stay(made):
    _, plain, better, _ = made
    assert better.stat().st_size == plain.stat().st_size
    with Bundle.open(plain) as before, Bundle.open(better) as after:
        assert after.layout.name == before.layout.name
        for name in before.layout.tensors:
            old, new = before.stored(name), after.stored(name)
            if isinstance(old, BlockedArray) and old.nested:
                assert isinstance(new, BlockedArray)
                np.testing.assert_array_equal(old.scale, new.scale)
            else:
                jax.tree.map(np.testing.assert_array_equal, old, new)


def test_the_same_text_writes_the_same_bytes_and_a_bundle_stands_for_its_floats(made, text, tmp_path):
    source, _, better, facts = made
    out = BundleOutput(tmp_path / "m.jaxllm")
    assert calibrate_nested(RECIPE, source, out, texts=[text]) == facts
    again, first = (planes(path)[0] for path in (tmp_path / "m.jaxllm", better))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    # A bundle stands for its floats.
    plain = made[1]
    facts = calibrate_nested(RECIPE, plain, out, texts=[text])
    assert facts["high_plane_error_held_out"] < 0.9
    (before, _), (after, _) = planes(plain), planes(tmp_path / "m.jaxllm")
    old, new = before["layers.1.ffn.down"], after["layers.1.ffn.down"]
    assert isinstance(old, QArray)
    assert isinstance(new, QArray)
    assert np.abs(np.asarray(new.data, np.int16) - np.asarray(old.data, np.int16)).max() == 1


def test_bad_input_is_told(made, text, tmp_path):
    source = made[0]
    out = BundleOutput(tmp_path / "out.jaxllm")
    with pytest.raises(ConfigError, match="has int8 weights, of which nothing is nested"):
        calibrate_nested(RECIPE, write_tiny_bundle(tmp_path / "m.jaxllm", "int8"), out)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        calibrate_nested(RECIPE, tmp_path / "missing", out)
    with pytest.raises(CheckpointError, match="create it first"):
        BundleOutput(tmp_path / "missing" / "out.jaxllm")
    with pytest.raises(ConfigError, match="at least 128 tokens of text, got 64; give more"):
        calibrate_nested(NestedRecipe(tokens=64), source, out, texts=[text])
    with pytest.raises(ConfigError, match="row_tokens must be a whole number of at least 16"):
        NestedRecipe(row_tokens=1)
    assert not out.path.exists()

    # Models that are not run so stay as they are.
    experts = dataclasses.replace(TINY, experts=4, experts_per_token=2, expert_ffn_size=32)
    mixture = {"cfg": experts, "params": random_params(experts)}
    path = write_tiny_bundle(tmp_path / "experts.jaxllm", "int8-nested", **mixture)
    with pytest.raises(ConfigError, match=r"others stay as they were prepared \(a mixture of experts"):
        calibrate_nested(RECIPE, path, out)


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True, "post_norms": True}, {"gated_ffn": False, "norm": "layer", "tied_head": True}],
)
def test_other_families(changes, text, tmp_path):
    cfg = dataclasses.replace(TINY, **changes)
    path = write_tiny_bundle(tmp_path / "m.jaxllm", "int8-nested", cfg=cfg, params=tiny_params(cfg))
    facts = calibrate_nested(RECIPE, path, BundleOutput(tmp_path / "out.jaxllm"), texts=[text])
    assert facts["high_plane_error"] < facts["high_plane_error_held_out"] < 0.95
