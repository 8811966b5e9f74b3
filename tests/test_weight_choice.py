"""`--weights auto`: sizes, losses, choices, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.bundle.writer import stored_form
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.decoder import forward, logits
from jaxllm.models.parameters import param_specs
from jaxllm.prepare import WeightRecipe as Recipe
from jaxllm.prepare import _text_tokens, prepare
from jaxllm.quant import as_floats, dequantize
from jaxllm.quant import weights as quant_weights
from jaxllm.weight_choice import WIDENED, WeightPlan, losses, plan_of_size, plans
from tests.models.configs import CONFIGS, params_of
from tests.tiny import TINY, random_params, tiny_tokenizer, write_tiny_bundle, write_tiny_folder

CFG = dataclasses.replace(TINY, hidden_size=64, ffn_size=96, layers=3, attention_windows=(0, 0, 0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with a tied head and with one of its own, whose predictions are far from even."""
    found = {}
    for tied in (True, False):
        cfg = dataclasses.replace(CFG, tied_head=tied)
        params = {name: each * np.float32(0.5) for name, each in random_params(cfg).items()}
        folder = tmp_path_factory.mktemp("auto") / f"tied-{tied}"
        found[tied] = write_tiny_folder(folder, cfg=cfg, params=params)
    return found


def log_probabilities(params, cfg, tokens):
    hidden, _ = forward(params, np.asarray([tokens], np.int32), cfg=cfg)
    return jax.nn.log_softmax(logits(params, hidden, cfg=cfg)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_divergence_of_the_bundle(folders, tmp_path, monkeypatch, tied):
    """Of its predictions from those of floats on the text's end, also with a vocabulary in parts."""
    monkeypatch.setattr(quant_weights, "PART_NUMBERS", 16 * CFG.hidden_size)
    out, floats = tmp_path / "m.jaxllm", tmp_path / "f.jaxllm"
    prepare(folders[tied], floats)
    with Bundle.open(floats) as bundle:
        cfg, exact, whole = bundle.cfg, bundle.load(), floats.stat().st_size
    _, held_out = _text_tokens(tiny_tokenizer(), cfg, ())
    chosen = prepare(folders[tied], out, weights=Recipe(weights="auto", most_bytes=int(0.36 * whole)))
    assert out.stat().st_size <= 0.36 * whole
    with Bundle.open(out) as bundle:
        params = {name: dequantize(each, jnp.float32) for name, each in bundle.load().items()}
        assert bundle.layout.weights == "int4"
        bits = {name: each.bits for name, each in bundle.layout.tensors.items()}
        assert bundle.load_part("chosen_weights").facts == dataclasses.asdict(chosen)
    # Some layers have more bits than others.
    assert {bits[f"layers.{layer}.ffn.down"] for layer in range(3)} <= {4, 8}
    assert sum(each == 8 for name, each in bits.items() if name.endswith(WIDENED)) in range(1, 15)
    right, got = (log_probabilities(each, cfg, held_out) for each in (exact, params))
    expected = float((jnp.exp(right) * (right - got)).sum(-1).mean())
    assert chosen.tokens == len(held_out)
    np.testing.assert_allclose(chosen.loss, expected, rtol=1e-3)


def test_plans_grow_and_their_sizes_are_those_of_files(folders, tmp_path):
    found = plans(CFG)
    sizes = [each.size_bytes(CFG) for each in found]
    assert [found[0].weights, found[1], found[-1].weights] == ["int4-all", WeightPlan("int4"), "int8"]
    assert sizes[:-1] == sorted(sizes[:-1])
    for plan in (found[0], found[1], found[-1]):
        prepare(folders[False], tmp_path / "m.jaxllm", weights=plan.weights)
        with Bundle.open(tmp_path / "m.jaxllm") as bundle:
            segments = bundle.layout.segments.values()
            size = sum(each.size_bytes for each in segments if each.name != "tokenizer")
        cfg = dataclasses.replace(CFG, tied_head=False)
        assert 0 <= plan.size_bytes(cfg) - size < (cfg.layers + 4) * 4096 + 4000
    assert plan_of_size(CFG, sizes[3]) == found[3]
    assert plan_of_size(CFG, sizes[3] - 1) == found[2]
    with pytest.raises(ConfigError, match="the smallest weights, int4-all, take"):
        plan_of_size(CFG, sizes[0] - 1)
    assert plan_of_size(CFG, 1, or_smallest=True) == found[0]


def test_more_loss_makes_smaller_bundles(folders, tmp_path):
    made = []
    for loss in (1e9, None, 1e-9):
        loss = loss or made[0][1] * 0.7
        chosen = prepare(folders[True], tmp_path / "m", weights=Recipe(weights="auto", max_loss=loss))
        made.append(((tmp_path / "m").stat().st_size, chosen.loss, chosen.description))
    assert [each[2] for each in (made[0], made[2])] == ["int4-all", "int8"]
    assert made[0][0] < made[2][0]
    assert made[0][1] > made[1][1] >= made[2][1] > 0
    assert made[1][1] <= made[0][1] * 0.7


def test_refusals(folders, tmp_path):
    for wrong in ({"weights": "int5"}, {"most_bytes": -1}, {"max_loss": 0.0}):
        with pytest.raises(ConfigError):
            Recipe(**wrong)
    short = Recipe(weights="int4", texts=("One sentence.",))
    with pytest.raises((ConfigError, CheckpointError), match="at least 64 tokens of text"):
        prepare(folders[True], tmp_path / "m.jaxllm", weights=short)
    write_tiny_bundle(tmp_path / "b.jaxllm")
    with pytest.raises(CheckpointError, match="is a bundle"):
        prepare(tmp_path / "b.jaxllm", tmp_path / "m.jaxllm", weights="auto")
    assert not (tmp_path / "m.jaxllm").exists()


@pytest.mark.parametrize("name", ["parallel", "experts", "everything", "norms-behind"])
def test_losses_of_other_models(name):
    cfg = CONFIGS[name]
    exact = {param: np.asarray(params_of(cfg)[param]) for param in param_specs(cfg)}
    text, held_out = [1, 5, 2, 7], [3, 1, 12, 0, 4, 6]
    (loss,) = losses(lambda form: exact.items(), cfg, [WeightPlan("int8")], text, held_out)
    stored = {
        param: as_floats(stored_form(param, value, param_specs(cfg)[param], "int8"))
        for param, value in exact.items()
    }
    right, got = (log_probabilities(each, cfg, held_out) for each in (exact, stored))
    np.testing.assert_allclose(loss, (jnp.exp(right) * (right - got)).sum(-1).mean(), rtol=0.02, atol=1e-6)
