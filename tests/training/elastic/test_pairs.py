"""Levels of an encoder-decoder, made from pairs: units of both sides, and an engine that serves them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_ladder, read_order, read_recovery
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import sub_config
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig, adapt
from jaxllm.models.parameters import param_specs
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.importance import Importance, measure, random_order
from jaxllm.training.elastic.job import ElasticRecipe, at_level, level_counts
from jaxllm.training.elastic.run import elasticize
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
from jaxllm.training.lora.run import require_trainable
from jaxllm.training.seq2seq.job import cross_entropy, init_seq2seq, target_logits
from jaxllm.training.seq2seq.translation import Translator
from tests.tiny import TINY
from tests.training.seq2seq.tiny import SWITCH, T5, batch, tiny_recipe, write_random_folder
from tests.training.tiny_runs import TLM_RECIPE, quiet

RECIPE = ElasticRecipe(
    steps=8, batch=4, row_tokens=32, peak_learning_rate=2e-2, warmup_steps=0, checkpoint_steps=4, log_steps=4,
    lora=LoraConfig(rank=2, alpha=4), held_out_share=0.2, levels=(50, 100), anchor_share=0.5,
    sources=(Source(pairs=("one.txt", "two.txt"), prefix="number to word:"),), calibration_tokens=128,
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(importance, "LEAST_TOKENS", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pairs_data):
    return write_random_folder(tmp_path_factory.mktemp("model"), pairs_data)


def run(recipe, folder, data, out, **options):
    bundle = BundleOutput(out / "out.jaxllm", "f32")
    return elasticize(recipe, folder, bundle, quiet(out / "run", data), **options)


def test_importance_is_the_slope_of_the_loss_along_a_unit_of_either_side(tmp_path):
    cfg, of = tiny_recipe(T5).cfg, batch()
    params = jax.device_get(jax.jit(lambda key: init_seq2seq(cfg, key))(jax.random.key(0)))
    found = measure(cfg, params, [of])

    @jax.jit
    def loss(params):
        losses = cross_entropy(target_logits(params, of, cfg=cfg)[0], of.targets)
        return jnp.sum(losses * of.weights) / of.weights.sum()

    for value, part, unit in (
        (found.cross[1][1], "layers.1.cross.", 1),
        (found.neurons[0][3], "layers.0.ffn.", 3),
        (found.encoder.groups[1][0], "encoder.layers.1.attn.", 0),
        (found.encoder.neurons[0][5], "encoder.layers.0.ffn.", 5),
    ):
        names = [name for name in params if name.startswith(part) and "norm" not in name]
        sides = []
        for factor in (1.02, 0.98):
            scaled = {name: np.array(params[name]) for name in names}
            for each in scaled.values():
                each[unit] *= np.float32(factor)
            sides.append(float(loss({**params, **scaled})))
        assert value == pytest.approx(abs(sides[0] - sides[1]) / 0.04, rel=0.05, abs=2e-5)
    # A layer that adds nothing has units that add nothing.
    quiet = dict(params)
    for name in ("attn.o", "ffn.down"):
        quiet[f"encoder.layers.0.{name}"] = np.zeros_like(params[f"encoder.layers.0.{name}"])
    grown = float(loss(quiet)) - float(loss(params))
    assert found.encoder.layers[0] == pytest.approx(grown, abs=1e-5)
    found.write(tmp_path / "importance.npz")
    again = Importance.read(tmp_path / "importance.npz", cfg)
    np.testing.assert_array_equal(again.encoder.layers, found.encoder.layers)
    np.testing.assert_array_equal(again.order(cfg).cross[0], found.order(cfg).cross[0])
    assert found.ladder((50, 100), 0.5).encoder.anchors == again.ladder((50, 100), 0.5).encoder.anchors
    assert len(random_order(cfg, 1).encoder.neurons) == 2


@pytest.mark.slow
def test_an_engine_serves_what_was_recovered(folder, pairs_data, tmp_path):
    facts = run(RECIPE, folder, pairs_data, tmp_path)
    half = facts["levels"]["50"]
    assert half["recovered"] < half["held_out"] - 0.1
    assert set(facts["encoder"]) == {"anchors", "layer_importance"}
    path = tmp_path / "out.jaxllm"
    with Bundle.open(path) as bundle:
        ladder, order, recovery = read_ladder(bundle), read_order(bundle), read_recovery(bundle, 50)
        cfg, params = bundle.cfg, {name: np.array(each) for name, each in bundle.load().items()}
    assert (len(ladder.anchors), len(ladder.encoder.anchors)) == (1, 1)
    assert {name.split(".")[0] for name in recovery.adapter} == {"encoder", "layers"}
    assert order.encoder is not None
    part = sub_config(cfg, ladder, 50)
    assert sum(np.prod(spec.shape) for spec in param_specs(part).values()) < sum(
        map(np.size, params.values())
    )
    # A level is counts of units and an adapter, of which units that it lacks have none.
    wide = {}
    for name, value in recovery.adapter.items():
        shape = np.shape(params[name.rpartition(".")[0]])
        rows = (*shape[:-1], 2) if name.endswith(".left") else (2, shape[-1])
        room = [(0, more - own) for own, more in zip(value.shape, rows, strict=True)]
        wide[name] = np.pad(value.astype(np.float32), room)
    level = at_level(adapt(params, wide, recovery.scaling), level_counts(cfg, ladder, 50), cfg)
    options = EngineOptions(chunk_tokens=(16,), decode_block=4, context_tokens=48, levels=(50,))
    engine = Engine.open(path, options=options)
    config = GenerationConfig(max_tokens=6, sampling=Sampling(temperature=0))
    answers = {each: engine.at(each).generate("number to word: 123", config).tokens for each in (50, 100)}
    tokenizer = engine.tokenizer
    engine.close()
    # The training's forward pass says the same, with its end.
    ends = set(tokenizer.eos_ids)
    for each, weights in ((50, level), (100, params)):
        (said,) = Translator(cfg, weights, tokenizer).translate([tokenizer.encode("number to word: 123")], 6)
        assert list(answers[each]) == [token for token in said if token not in ends]
    # Nothing is done twice.
    assert run(RECIPE, folder, pairs_data, tmp_path) == facts


@pytest.mark.slow
def test_levels_are_trained_together(folder, pairs_data, tmp_path):
    one = {"steps": 2, "warmup_steps": 0, "checkpoint_steps": 2, "order": "magnitude"}
    facts = run(dataclasses.replace(RECIPE, recovery="joint", **one), folder, pairs_data, tmp_path)
    assert set(facts["levels"]) == {"50", "100"}
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        assert read_recovery(bundle, 50) is None


def test_what_is_refused(folder, pairs_data, model, tmp_path):
    with pytest.raises(ConfigError, match="--tiny-lm none"):
        run(RECIPE, folder, pairs_data, tmp_path, tiny_lm=TinyLmRun(TLM_RECIPE, None))
    for change, message in (
        ({"units": "global"}, "--units equal"),
        ({"sources": (Source(text="one.txt"),)}, "learns from pairs, but one has none: give --pairs"),
        ({"sources": (Source(pairs=("one.txt", "none.txt")),)}, "cannot read .*none.txt"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(dataclasses.replace(RECIPE, **change), folder, pairs_data, tmp_path)
    with pytest.raises(ConfigError, match="pairs of sources and targets are for encoder-decoders"):
        run(RECIPE, model, pairs_data, tmp_path)
    switch = write_random_folder(tmp_path / "switch", pairs_data, SWITCH)
    with pytest.raises(ConfigError, match="levels of an encoder-decoder with experts: not yet"):
        run(RECIPE, switch, pairs_data, tmp_path)
    bart = dataclasses.replace(tiny_recipe(T5).cfg, model_type="bart")
    with pytest.raises(ConfigError, match="trained of t5, mt5, switch_transformers, and this is bart"):
        require_trainable(bart, RECIPE, "levels")
    require_trainable(TINY, RECIPE, "levels")
    words = ["elasticize", folder, "-o", tmp_path / "o", "--run", tmp_path / "r", "--tiny-lm", "none"]
    pairs = ["--pairs", pairs_data / "one.txt", pairs_data / "two.txt", "--prefix", "a", "--prefix", "b"]
    result = CliRunner().invoke(cli, [str(word) for word in (*words, *pairs)])
    assert result.exit_code == 2
    assert "1 --pairs and 2 --prefix" in result.stderr
