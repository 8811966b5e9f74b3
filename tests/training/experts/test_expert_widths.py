"""Calibration of a tiny mixture: losses, widths within a loss, a run that goes on, and the bundle."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import expert_facts, read_path_counts
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models import decoder
from jaxllm.models.parameters import expert_parameter, param_specs
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize
from jaxllm.training import calibration
from jaxllm.training.calibration import BundleOutput, ExpertWidthsRecipe, WidthTarget
from jaxllm.training.experts import expert_widths as room
from jaxllm.training.experts.expert_widths import quantize_experts
from jaxllm.training.experts.measures import TextPerplexity, WidthLosses
from jaxllm.training.loop.fitting import FrozenModel
from tests.tiny import BEGIN_ID, TINY, tiny_params, write_tiny_folder
from tests.training.tiny_runs import quiet

CFG = dataclasses.replace(
    TINY, model_type="qwen3_moe", qk_norm=True, layers=2, attention_windows=(), experts=4,
    experts_per_token=2, expert_ffn_size=32, sparse_layers=(True, True),
)  # fmt: skip
PIECES = sorted(pre_tokenizers.ByteLevel.alphabet())
RECIPE = ExpertWidthsRecipe(tokens=2048, row_tokens=32, batch=16)


# Letters that are a token each.
LETTERS = "abcdfgijkmnopqrs"


@pytest.fixture(scope="module")
def params():
    """Sure of what comes next. One expert of a layer matters far more than the others."""
    found = {name: np.array(value) for name, value in tiny_params(CFG).items()}
    found["head"] *= 20
    for name in found:
        if ".experts." in name:
            found[name][2] *= 4
        if name.endswith("router"):
            found[name] *= 3
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, params):
    return write_tiny_folder(tmp_path_factory.mktemp("mixture"), cfg=CFG, params=params)


@pytest.fixture(scope="module")
def text(tmp_path_factory, params):
    """What the model itself would say, so that whatever else it becomes loses."""

    @jax.jit
    def scores(tokens):
        hidden = decoder.forward_documents(params, tokens, cfg=CFG, differentiable=False)
        return decoder.logits(params, hidden, cfg=CFG)

    allowed = np.array([PIECES.index(letter) for letter in LETTERS])
    draw, tokens = np.random.default_rng(0), np.zeros((96, 48), np.int32)
    tokens[:, 0] = BEGIN_ID
    for at in range(1, tokens.shape[1]):
        chances = np.asarray(scores(tokens))[:, at - 1, allowed]
        tokens[:, at] = allowed[np.argmax(chances + draw.gumbel(size=chances.shape), axis=-1)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join("".join(PIECES[token] for token in row[1:]) for row in tokens))
    return path


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    for module in (room, calibration):
        monkeypatch.setattr(module, "LEAST_TOKENS", 256)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Losses are measured once for all tests."""
    return tmp_path_factory.mktemp("run") / "run"


def calibrated(folder, text, run_dir, out, **how):
    target, out = WidthTarget(**how), BundleOutput(out)
    return quantize_experts(RECIPE, folder, out, quiet(run_dir), target=target, texts=[text])


@pytest.mark.slow
def test_widths_keep_the_loss(folder, text, run_dir, tmp_path):
    out = tmp_path / "mixed.jaxllm"
    most = calibrated(folder, text, run_dir, out, uniform=2)["loss"] / 2
    facts = calibrated(folder, text, run_dir, out, most_loss=most)
    assert 0 < facts["loss"] <= most
    assert 0 < facts["held_out_loss"] < 3 * most
    assert 0 < facts["lowered"] < 8
    assert facts["widths"] == {"2": facts["lowered"], str(facts["upper"]): 8 - facts["lowered"]}
    with Bundle.open(out) as bundle:
        assert bundle.layout.experts_apart
        assert expert_facts(bundle)["loss"] == facts["loss"]
        counts = read_path_counts(bundle)
        assert counts.alone.sum() == 2 * 2 * facts["tokens"]
        bits = [
            bundle.layout.tensors[f"layers.{layer}.experts.{expert}.up"].bits
            for layer in range(2)
            for expert in range(4)
        ]
        assert bits.count(2) == facts["lowered"]
        # The heavy expert of the first layer costs most.
        assert bits[2] == facts["upper"]


def test_more_loss_lowers_more_and_measures_little(folder, text, run_dir, tmp_path):
    calibrated(folder, text, run_dir, tmp_path / "a.jaxllm", most_loss=5.0)
    before = json.loads((run_dir / "losses.json").read_text())
    facts = calibrated(folder, text, run_dir, tmp_path / "b.jaxllm", most_loss=10.0)
    assert facts["widths"] == {"2": 8}
    assert json.loads((run_dir / "losses.json").read_text()) == before


def test_uniform_widths(folder, text, run_dir, tmp_path):
    out = tmp_path / "float.jaxllm"
    facts = calibrated(folder, text, run_dir, out, uniform=32)
    assert facts["loss"] == 0.0
    assert facts["widths"] == {"32": 8}
    with Bundle.open(out) as bundle:
        loaded, params = bundle.load(), {}
        for name in param_specs(CFG):
            each = loaded[name]
            params[name] = dequantize(each, np.dtype(np.float32))
        assert expert_parameter("layers.0.experts.up", 3) in bundle.layout.tensors
    np.testing.assert_array_equal(
        params["layers.1.experts.down"][2], 4 * tiny_params(CFG)["layers.1.experts.down"][2]
    )


def test_the_loss_of_one_expert(folder, text, run_dir, tmp_path):
    """What a model with that one expert's weights replaced loses, and nothing where none is."""
    calibrated(folder, text, run_dir, tmp_path / "a.jaxllm", uniform=32)
    frozen = FrozenModel.read(folder)
    batches, _ = room._split(room.TokenizedDocuments.read(run_dir / "tokens"), RECIPE)
    text = TextPerplexity(frozen.cfg, batches)
    losses = WidthLosses(frozen.cfg, frozen.params, text, tmp_path / "losses.json")
    assert losses.loss_of(np.full((2, 4), 32)) == 0.0
    alone = np.full((2, 4), 32)
    alone[0, 2] = 2
    with_one = losses._with_widths(alone)
    changed = [name for name in with_one if not np.array_equal(with_one[name], frozen.params[name])]
    assert changed == [f"layers.0.experts.{part}" for part in ("gate", "up", "down")]
    different = np.asarray(with_one[changed[0]]) != np.asarray(frozen.params[changed[0]])
    assert different.any(axis=(1, 2)).tolist() == [False, False, True, False]
    assert losses.loss_of(alone) > losses.loss_of(np.where(alone == 2, 8, alone))


@pytest.mark.slow
def test_a_bundle_is_calibrated_as_its_weights_are(folder, text, tmp_path):
    """Experts get narrower, never wider; all else, and who keeps its width, stays byte for byte."""
    source, out, run = tmp_path / "source.jaxllm", tmp_path / "out.jaxllm", tmp_path / "run"
    prepare(folder, source, weights="int8")
    facts = calibrated(source, text, run, out, uniform=8)
    assert facts["loss"] < 0.005
    with Bundle.open(source) as together, Bundle.open(out) as apart:
        before, after = together.load(), apart.load()
        for name in param_specs(CFG):
            whole = [dequantize(each[name], np.dtype(np.float32)) for each in (before, after)]
            np.testing.assert_array_equal(*whole)
        assert read_path_counts(apart).alone.sum() == 2 * 2 * facts["tokens"]
    lossy = calibrated(source, text, run, out, uniform=2)
    assert lossy["loss"] > facts["loss"]
    assert lossy["widths"] == {"2": 8}
    # What is apart already may get narrower still, not wider.
    again = calibrated(out, text, tmp_path / "again", tmp_path / "again.jaxllm", uniform=2)
    assert again["widths"] == {"2": 8}
    with pytest.raises(ConfigError, match="has experts of 2 bits, and 4 would be larger, not better"):
        calibrated(out, text, tmp_path / "wider", tmp_path / "wider.jaxllm", uniform=4)


def test_refusals(folder, text, run_dir, model, tmp_path):
    out, short, other = tmp_path / "a.jaxllm", tmp_path / "short.txt", tmp_path / "other.txt"
    short.write_text("hello there")
    calibrated(folder, text, run_dir, out, uniform=32)
    out.unlink()
    other.write_text("hello there\n\n" + text.read_text())
    for source, of, where, how, message in (
        (folder, text, run_dir, {"most_loss": 1e-9}, r"at most 0\.0\d%: the least, by 8 bits .* allow"),
        (folder, text, run_dir, {"uniform": 3}, r"among \(2, 4, 8, 16, 32\), got 3"),
        (folder, text, run_dir, {"most_loss": 0.0}, "must be positive"),
        (folder, other, run_dir, {}, "holds another run, it differs in the documents"),
        (folder, short, tmp_path / "run", {}, r"the text has \d+ tokens; .* give more text"),
        (model, text, tmp_path / "run", {}, "no mixture of experts; `jaxllm prepare`"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrated(source, of, where, out, **how)
    with pytest.raises(CheckpointError, match="no such file or folder; give a Hugging Face"):
        calibrated(out, text, tmp_path / "run", tmp_path / "b.jaxllm")
    assert not out.exists()
