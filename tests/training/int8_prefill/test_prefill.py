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
from jaxllm.bundle.calibrations import prefill_facts, read_prefill
from jaxllm.bundle.levels import elastic_parts, read_ladder
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.int8_prefill.recipe import ShadowRecipe
from jaxllm.int8_prefill.shadow import PRODUCTS, product_names
from jaxllm.quant import dequantize
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.calibration import BundleOutput, PrefillRecipe
from jaxllm.training.int8_prefill.prefill import _texts, calibrate_prefill
from tests.int8_prefill.calibrated import OUTLIERS, outlying
from tests.tiny import write_tiny_bundle, write_tiny_folder

RECIPE = PrefillRecipe(tokens=2048, row_tokens=64, shadow=ShadowRecipe(most_channels=0.06, pruned_share=0.5))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = np.random.default_rng(0).integers(97, 123, (600, 8)).astype(np.uint8)
    path.write_text(" ".join(bytes(word).decode() for word in words))
    return path


@pytest.mark.slow
def test_a_folder(text, tmp_path):
    """Its float rows are the checkpoint's, and channels with outliers are among them."""
    folder = write_tiny_folder(tmp_path / "hf", params=outlying())
    facts = calibrate_prefill(RECIPE, folder, BundleOutput(tmp_path / "m.jaxllm"), texts=[text])
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
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
    for wrong in (["--run", "x"], ["--max-loss", "1"], ["--max-loss", "0%"]):
        assert CliRunner().invoke(cli, ["calibrate", "prefill", *args, *wrong]).exit_code == 2


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
    with pytest.raises(ConfigError, match="tokens must be a whole number of at least 2048"):
        PrefillRecipe(tokens=5)
    with pytest.raises(ConfigError, match="weight_scales must be one of channel, tensor"):
        PrefillRecipe(weight_scales="row")
