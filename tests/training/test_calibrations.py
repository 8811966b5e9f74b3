"""From a model to a bundle that reads prompts in integers; elastic ones keep their levels."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import has_channel_scales, prefill_facts, read_prefill
from jaxllm.bundle.levels import elastic_parts, read_ladder
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.gguf_file import write_plain_gguf
from jaxllm.export.plain_model import read_plain
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.int8_prefill.shadow import PRODUCTS, product_names
from jaxllm.models.decoder import forward_documents
from jaxllm.models.parameters import Params
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize, from_blocks
from jaxllm.quant.blocks import BlockedArray
from jaxllm.quant.parts import high_plane
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.calibration import BundleOutput, NestedRecipe, PrefillRecipe, text_tokens
from jaxllm.training.int8_prefill.prefill import _texts, calibrate_prefill
from jaxllm.training.speculation.nested import calibrate_nested
from tests.int8_prefill.calibrated import OUTLIERS, outlying
from tests.tiny import TINY, random_params, tiny_params, write_tiny_bundle, write_tiny_folder

RECIPE = PrefillRecipe(tokens=2048, row_tokens=64, shadow=ShadowRecipe(most_channels=0.06, pruned_share=0.5))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).integers(97, 123, (600, 8)).astype(np.uint8)
    path.write_text(" ".join(bytes(word).decode() for word in words))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("gguf", [False, True])
def test_a_folder_or_gguf_file(text, tmp_path, gguf):
    """Its float rows are the checkpoint's, and channels with outliers are among them. Weights with groups
    get one scale per channel."""
    model = write_tiny_folder(tmp_path / "hf", params=outlying())
    if gguf:
        prepare(model, tmp_path / "f32.jaxllm")
        with Bundle.open(tmp_path / "f32.jaxllm") as bundle:
            model = tmp_path / "m.gguf"
            write_plain_gguf(model, read_plain(bundle), "int8")
    facts = calibrate_prefill(RECIPE, model, BundleOutput(tmp_path / "m.jaxllm"), texts=[text])
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        assert has_channel_scales(bundle)
        found = read_prefill(bundle)
        assert found is not None
        assert bundle.layout.weights == "int8"
        assert prefill_facts(bundle)["tokens"] >= 2048
        assert facts["losses"][100] == [round(each, 5) for each in found.losses[100]]
        layer = found.shadowed.index(True)
        scaled = np.flatnonzero(outlying()["layers.0.attn_norm.scale"] != 1)
        assert len(scaled) == OUTLIERS.channels
        assert set(scaled) <= set(found.channels[layer, 0])
    assert facts["channels"] > 0 < facts["row_bytes"]


@pytest.mark.slow
def test_the_command_for_an_elastic_bundle(text, tmp_path):
    """Every level has steps and losses of its own. With one scale per tensor that of a product's weight is
    the same for all outputs, no other weight changes, and the bundle says so."""
    ladder = Ladder(levels=(50, 100), anchors=())
    path = write_tiny_bundle(tmp_path / "e.jaxllm", "int8", parts=elastic_parts(ladder))
    out = tmp_path / "p.jaxllm"
    args = [str(path), "-o", str(out), "--text", str(text), "--tokens", "2048"]
    options = ["--weight-scales", "tensor", "--max-loss", "99%"]
    run = CliRunner().invoke(cli, ["calibrate", "prefill", *args, *options])
    assert run.exit_code == 0, run.output
    assert json.loads(run.output.splitlines()[-1])["layers"] == 2
    with Bundle.open(path) as before, Bundle.open(out) as after:
        assert read_ladder(after) == ladder
        found = read_prefill(after)
        assert found.levels == (50, 100)
        assert not np.array_equal(found.steps[0], found.steps[1])
        assert found.losses.keys() == {50, 100}
        assert prefill_facts(after)["weight_scales"] == "tensor"
        plain, shared = before.load(), after.load()
        places = itertools.product(range(before.cfg.layers), range(len(PRODUCTS)))
        products = {name for place in places for name in product_names(*place, before.cfg)}
        assert products < set(plain)
        for name, weight in plain.items():
            if name in products:
                assert len(np.unique(shared[name].scale)) == 1 < len(np.unique(weight.scale))
                most = np.asarray(shared[name].scale).max() / 2 + 1e-6
                floats = (dequantize(each[name], jnp.float32) for each in (shared, plain))
                np.testing.assert_allclose(*floats, atol=most)
            else:
                jax.tree.map(np.testing.assert_array_equal, weight, shared[name])


@pytest.mark.slow
def test_a_model_that_loses_too_much_makes_no_bundle(text, tmp_path, monkeypatch):
    """What is written is what an engine opens without more being allowed. A random model may gain."""
    # No finer steps are tried.
    monkeypatch.setattr("jaxllm.int8_prefill.recipe._FINER", 0)
    path = write_tiny_bundle(tmp_path / "m.jaxllm", "int8", params=outlying())
    out = tmp_path / "out.jaxllm"
    recipe = dataclasses.replace(RECIPE, shadow=dataclasses.replace(RECIPE.shadow, pruned_share=0.0))
    with pytest.raises(ConfigError, match=r"grow by .* and -50\.00% were allowed.*--max-loss"):
        calibrate_prefill(recipe, path, BundleOutput(out), texts=[text], most_loss=-0.5)
    assert not out.exists()


def test_every_text_is_looked_at(text, tmp_path):
    """However much there is of the first one."""
    paragraphs, other = tmp_path / "paragraphs.txt", tmp_path / "other.txt"
    paragraphs.write_text(text.read_text().replace(" ", "\n\n"))
    other.write_text("ABC\n\n" * 20)
    path = write_tiny_bundle(tmp_path / "m.jaxllm", "int8")
    with Bundle.open(path) as bundle:
        rows, held_out = _texts(bundle, RECIPE, [paragraphs, other])
        read = Tokenizer(bundle.tokenizer_files()).decode(np.concatenate([*rows, *held_out]).tolist())
    assert "ABC" in read
    assert any(word in read for word in text.read_text().split()[:20])


def test_refusals(text, tmp_path):
    out = BundleOutput(tmp_path / "out.jaxllm")

    def refused(model, error, message, texts=(text,), recipe=RECIPE):
        with pytest.raises(error, match=message):
            calibrate_prefill(recipe, model, out, texts=texts)
        assert not (tmp_path / "out.jaxllm").exists()

    integer = write_tiny_bundle(tmp_path / "i.jaxllm", "int8")
    refused(tmp_path / "none", CheckpointError, "no such file or folder")
    refused(write_tiny_bundle(tmp_path / "f.jaxllm"), ConfigError, "has f32")
    short = tmp_path / "short.txt"
    short.write_text("hello there")
    refused(integer, ConfigError, "2048 tokens each, and there are 0: give more text", texts=[short])
    refused(integer, ConfigError, "missing", texts=[tmp_path / "missing.txt"])
    broken = dict(outlying())
    broken["layers.1.ffn_norm.scale"] = np.full_like(broken["layers.1.ffn_norm.scale"], 3e38)
    refused(write_tiny_bundle(tmp_path / "n.jaxllm", "int8", params=broken), ConfigError, "is not finite")


# Nested weights calibrated on a text: a bundle of the same size, whose high planes are a better model.
NESTED = NestedRecipe(tokens=2048, row_tokens=64)


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
    """The folder, its bundle, the calibrated one, and what was found."""
    folder = tmp_path_factory.mktemp("nested")
    source = write_tiny_folder(folder / "hf")
    prepare(source, folder / "plain.jaxllm", weights="int8-nested", name="hf")
    facts = calibrate_nested(NESTED, source, BundleOutput(folder / "better.jaxllm"), texts=[text])
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
            {name: read(each, plane) for name, each in stored.items()} for plane in (lambda x: x, high_plane)
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
        for name in before.layout.tensors:
            old, new = before.stored(name), after.stored(name)
            if isinstance(old, BlockedArray) and old.nested:
                assert isinstance(new, BlockedArray)
                np.testing.assert_array_equal(old.scale, new.scale)
            else:
                jax.tree.map(np.testing.assert_array_equal, old, new)


def test_the_same_text_writes_the_same_bytes_and_a_bundle_its_floats(made, text, tmp_path):
    source, _, better, facts = made
    out = BundleOutput(tmp_path / "m.jaxllm")
    assert calibrate_nested(NESTED, source, out, texts=[text]) == facts
    again, first = (planes(path)[0] for path in (tmp_path / "m.jaxllm", better))
    jax.tree.map(np.testing.assert_array_equal, again, first)
    plain = made[1]
    facts = calibrate_nested(NESTED, plain, out, texts=[text])
    assert facts["high_plane_error_held_out"] < 0.9
    (before, _), (after, _) = planes(plain), planes(tmp_path / "m.jaxllm")
    old, new = before["layers.1.ffn.down"], after["layers.1.ffn.down"]
    assert np.abs(np.asarray(new.data, np.int16) - np.asarray(old.data, np.int16)).max() == 1


def test_bad_input_is_refused(made, text, tmp_path):
    source = made[0]
    out = BundleOutput(tmp_path / "out.jaxllm")
    with pytest.raises(ConfigError, match="has int8 weights, of which nothing is nested"):
        calibrate_nested(NESTED, write_tiny_bundle(tmp_path / "m.jaxllm", "int8"), out)
    with pytest.raises(ConfigError, match="at least 128 tokens of text, got 64; give more"):
        calibrate_nested(NestedRecipe(tokens=64), source, out, texts=[text])
    assert not out.path.exists()

    # Models that are not run so stay as they are.
    experts = dataclasses.replace(TINY, experts=4, experts_per_token=2, expert_ffn_size=32)
    mixture = {"cfg": experts, "params": random_params(experts)}
    path = write_tiny_bundle(tmp_path / "experts.jaxllm", "int8-nested", **mixture)
    with pytest.raises(ConfigError, match=r"others stay as they were prepared \(a mixture of experts"):
        calibrate_nested(NESTED, path, out)


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True, "post_norms": True}, {"gated_ffn": False, "norm": "layer", "tied_head": True}],
)
def test_other_families(changes, text, tmp_path):
    cfg = dataclasses.replace(TINY, **changes)
    path = write_tiny_bundle(tmp_path / "m.jaxllm", "int8-nested", cfg=cfg, params=tiny_params(cfg))
    facts = calibrate_nested(NESTED, path, BundleOutput(tmp_path / "out.jaxllm"), texts=[text])
    assert max(facts["high_plane_error"], facts["high_plane_error_held_out"]) < 0.95
