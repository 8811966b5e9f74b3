"""From a folder to an elastic bundle: every step once, resumed, and served as it was measured."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm.training.elastic.run
import jaxllm.training.elastic.tiny_lm.run
from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.kit import read_kit
from jaxllm.bundle.levels import read_ladder, read_order, read_recovery
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.bundle.writer import stored_form
from jaxllm.elastic.ladder import layer_parameters, sub_config
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.lora import LoraConfig, adapt
from jaxllm.models.parameters import param_specs
from jaxllm.models.tiny_lm import forward_both
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.sources import Source
from jaxllm.training.decoders import LoraRecipe, require_trainable, train_lora
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.importance import measure
from jaxllm.training.elastic.job import ElasticRecipe, at_level, level_counts
from jaxllm.training.elastic.run import elasticize
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRun
from jaxllm.training.loop.parallel import MeshShape
from jaxllm.training.seq2seq.run import Translator, cross_entropy, init_seq2seq, target_logits
from tests.tiny import TINY, tiny_params, write_tiny_folder
from tests.training.seq2seq.tiny import SWITCH, T5, batch, tiny_recipe, write_random_folder
from tests.training.tiny_runs import TLM_RECIPE, join, quiet, started_group, told_by


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(importance, "LEAST_TOKENS", 4)


RECIPE = ElasticRecipe(
    steps=12, batch=2, row_tokens=128, peak_learning_rate=2e-2, warmup_steps=2, checkpoint_steps=6,
    log_steps=6,
    lora=LoraConfig(rank=2, alpha=4), sources=(Source(task="sentiment"),), held_out_share=0.1,
    levels=(50, 100), anchor_share=0.5, calibration_tokens=512,
)  # fmt: skip


def run(recipe, model, data, folder, *, weights=None, tlm=None, encoder=None):
    kit = None if recipe.recovery == "joint" else folder / "out.kit"
    out = BundleOutput(folder / "out.jaxllm", weights, kit=kit)
    tiny_lm = None if tlm is None else TinyLmRun(tlm, encoder)
    return elasticize(recipe, model, out, quiet(folder / "run", data), tiny_lm=tiny_lm)


QUICK = dataclasses.replace(RECIPE, recovery="none", order="random")


@pytest.fixture(scope="module")
def plain(model, data, tmp_path_factory):
    """The folder of a run without recovery and in another order, and of its bundle."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importance, "LEAST_TOKENS", 64)
        run(QUICK, model, data, folder)
    return folder


def stop(*_, **__):
    raise AssertionError("this was done before")


@pytest.mark.slow
def test_levels_are_recovered_and_nothing_is_done_twice(model, data, tmp_path, monkeypatch):
    facts = run(RECIPE, model, data, tmp_path, weights="int8", tlm=TLM_RECIPE)
    path, folder = tmp_path / "out.jaxllm", tmp_path / "run"
    half = facts["levels"]["50"]
    assert half["recovered"] < half["held_out"] - 0.1
    assert set(facts["levels"]["100"]) == {"share", "held_out"}
    with Bundle.open(path) as bundle:
        bundle.verify()
        ladder, found, tiny = read_ladder(bundle), read_recovery(bundle, 50), read_tiny_lm(bundle)
        assert (ladder.levels, len(ladder.anchors)) == ((50, 100), 1)
        assert bundle.layout.weights == "int8"
        assert found.scaling == 2.0
        assert half["share"] == layer_parameters(sub_config(TINY, ladder, 50)) / layer_parameters(TINY)
        assert bundle.layout.parts["elastic"].facts["levels"] == facts["levels"]
        # The whole model is what it was, bit for bit, in another order.
        order, stored = read_order(bundle), bundle.load()
        for name, value in reorder(TINY, tiny_params().items(), order):
            wanted = stored_form(name, value, param_specs(TINY)[name], "int8")
            for one, other in zip(jax.tree.leaves(stored[name]), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)
        moved = dequantize(stored["layers.0.ffn.up"], np.float32) - tiny_params()["layers.0.ffn.up"]
        assert np.abs(moved).max() > 0.05
        # The tiny LM is of the same levels, and stored in float32 beside a model of any width.
        assert (tiny.levels, tiny.prompt_ratios) == (ladder.levels, TLM_RECIPE.prompt_ratios)
        tokens = np.array([[*tiny.mark_ids[:2], 5, 6, 7]], np.int32)
        params = {name: np.array(value) for name, value in tiny.params.items()}
        keep, (level, prompt) = forward_both(params, tokens, np.ones((1, 5), bool), cfg=tiny.cfg)
        assert (keep.shape, level.shape, prompt.shape) == ((1, 5), (1, 2), (1, 3))

    # A kit of it makes the same of the same folder.
    prepare(model, tmp_path / "again.jaxllm", weights="int8", parts=read_kit(tmp_path / "out.kit"))
    with Bundle.open(path) as bundle, Bundle.open(tmp_path / "again.jaxllm") as again:
        for name, each in bundle.layout.segments.items():
            if not name.startswith("part."):
                assert again.layout.segments[name].xxh3_128 == each.xxh3_128, name
        assert read_tiny_lm(again).levels == read_tiny_lm(bundle).levels

    # The same again: read, not done.
    written = path.read_bytes()
    monkeypatch.setattr(jaxllm.training.elastic.run, "measure", stop)
    with monkeypatch.context() as patch:
        patch.setattr(jaxllm.training.elastic.tiny_lm.run, "answer", stop)
        assert run(RECIPE, model, data, tmp_path, weights="int8", tlm=TLM_RECIPE) == facts
    assert path.read_bytes() == written
    assert json.loads((folder / "summary.json").read_text()) == facts

    # More steps: importance is known, the adapters go on, and to others belongs another tiny LM.
    folders = []

    def trained(sources, elastic, run, **_):
        folders.append(run.folder)
        return tiny

    monkeypatch.setattr(jaxllm.training.elastic.run, "train_tiny_lm", trained)
    longer = dataclasses.replace(RECIPE, steps=18)
    run(longer, model, data, tmp_path, weights="int8", tlm=TLM_RECIPE)
    metrics = (folder / "levels" / "50" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [6, 12, 18]
    assert folders != list(folder.glob("tlm-*"))
    assert path.read_bytes() != written


@pytest.mark.slow
def test_levels_are_trained_together_within_a_bound(model, data, tmp_path):
    together = dataclasses.replace(RECIPE, recovery="joint", importance="fisher", whole_kl_nats=0.02)
    facts = run(together, model, data, tmp_path)
    assert 0 < facts["whole_kl_nats"] <= 0.02
    assert 0 < facts["whole_share"] < 1
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        table = dequantize(bundle.load()["embed.tokens"], np.float32)
        assert not np.array_equal(table, tiny_params()["embed.tokens"])
        assert read_recovery(bundle, 50) is None
        assert bundle.layout.parts["elastic"].facts["whole_kl_nats"] == facts["whole_kl_nats"]
    assert all("recovered" not in each for each in facts["levels"].values())


def test_what_the_tiny_lm_lacks_is_said_before_the_work(model, data, tmp_path):
    lacking = dataclasses.replace(TLM_RECIPE, compressions=("none.jsonl",))
    for given, recipe, how, error, message in (
        (data, lacking, {}, ConfigError, r"cannot read .*none\.jsonl"),
        (data, TLM_RECIPE, {"encoder": tmp_path / "nowhere"}, CheckpointError, "nowhere"),
        (None, TLM_RECIPE, {}, ConfigError, r"say with --data .*leave it out \(--tiny-lm none\)"),
    ):
        with pytest.raises(error, match=message):
            run(RECIPE, model, given, tmp_path, tlm=recipe, **how)
    assert not (tmp_path / "run").exists()


def test_unusable_inputs_are_refused(model, data, tmp_path, plain, monkeypatch):
    with pytest.raises(ConfigError, match="differs in anchor_share"):
        run(dataclasses.replace(QUICK, anchor_share=0.0), model, data, plain)
    with pytest.raises(ConfigError, match="differs in the weights"):
        run(QUICK, model, data, plain, weights="int8")
    other = write_tiny_folder(tmp_path / "other", params=tiny_params(seed=1))
    with pytest.raises(ConfigError, match="differs in the model"):
        run(QUICK, other, data, plain)
    shutil.copytree(plain / "run", tmp_path / "run")
    (tmp_path / "run" / "importance.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"importance\.npz.*remove it"):
        run(QUICK, model, data, tmp_path)

    with pytest.raises(CheckpointError, match="is no Hugging Face folder"):
        run(RECIPE, tmp_path / "nothing", data, tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        BundleOutput(tmp_path / "no" / "out.jaxllm")
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(importance, "LEAST_TOKENS", 10**6)
    with pytest.raises(ConfigError, match="the calibration text has"):
        run(RECIPE, model, data, tmp_path)
    assert not (tmp_path / "out.jaxllm").exists()


# Adapters and elastic models by a group of two processes: the results of one.
SHORT = {"steps": 2, "warmup_steps": 0, "checkpoint_steps": 2, "log_steps": 2}
TOGETHER = dataclasses.replace(RECIPE, **SHORT, recovery="joint", units="global", whole_kl_nats=1.0)
LORA = LoraRecipe(
    **SHORT, batch=2, row_tokens=128, peak_learning_rate=1e-2, sources=RECIPE.sources, held_out_share=0.1
)


def both(model, data, folder, mesh):
    """The losses of an adapter and of levels."""
    run = dataclasses.replace(quiet(folder, data), mesh_shape=MeshShape.parse(mesh))
    adapter = train_lora(LORA, model, run.stage("lora"))
    summary = json.loads((adapter.parent / "summary.json").read_text())
    facts = elasticize(TOGETHER, model, BundleOutput(folder / "out.jaxllm"), run.stage("run"))
    return [*summary["held_out"].values(), *(each["held_out"] for each in facts["levels"].values())]


def main(model, data, folder, port, process):
    """One process of two."""
    join(port, process, 1)
    importance.LEAST_TOKENS = 64
    print(json.dumps(both(Path(model), Path(data), Path(folder), "data=1,fsdp=2")))


@pytest.mark.slow
def test_two_processes_have_the_results_of_one(model, data, tmp_path):
    folders = [tmp_path / name for name in ("group", "alone")]
    for folder in folders:
        folder.mkdir()
    group = started_group("tests.training.elastic.test_run", model, data, folders[0])
    wanted = both(model, data, folders[1], "data=1")
    for process in group:
        np.testing.assert_allclose(told_by(process), wanted, rtol=2e-3)
    bundles = [Bundle.open(folder / "out.jaxllm").load() for folder in folders]
    for name, value in bundles[0].items():
        np.testing.assert_allclose(value, bundles[1][name], atol=5e-2, err_msg=name)
    assert (folders[0] / "lora" / "adapter" / "adapter_config.json").exists()


# Levels of an encoder-decoder, made from pairs: units of both sides, and an engine that serves them.
PAIRS = ElasticRecipe(
    steps=8, batch=4, row_tokens=32, peak_learning_rate=2e-2, warmup_steps=0, checkpoint_steps=4, log_steps=4,
    lora=LoraConfig(rank=2, alpha=4), held_out_share=0.2, levels=(50, 100), anchor_share=0.5,
    sources=(Source(pairs=("one.txt", "two.txt"), prefix="number to word:"),), calibration_tokens=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory, pairs_data):
    return write_random_folder(tmp_path_factory.mktemp("model"), pairs_data)


def run_pairs(recipe, t5_folder, data, out, **options):
    bundle = BundleOutput(out / "out.jaxllm", "f32")
    return elasticize(recipe, t5_folder, bundle, quiet(out / "run", data), **options)


def test_importance_is_the_slope_of_the_loss_along_a_unit_of_either_side():
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


@pytest.mark.slow
def test_an_engine_serves_what_was_recovered(t5_folder, pairs_data, tmp_path):
    facts = run_pairs(PAIRS, t5_folder, pairs_data, tmp_path)
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
    assert run_pairs(PAIRS, t5_folder, pairs_data, tmp_path) == facts


def test_what_is_refused_of_pairs(t5_folder, pairs_data, model, tmp_path):
    with pytest.raises(ConfigError, match="--tiny-lm none"):
        run_pairs(PAIRS, t5_folder, pairs_data, tmp_path, tiny_lm=TinyLmRun(TLM_RECIPE, None))
    for change, message in (
        ({"units": "global"}, "--units equal"),
        ({"sources": (Source(text="one.txt"),)}, "learns from pairs, but one has none: give --pairs"),
        ({"sources": (Source(pairs=("one.txt", "none.txt")),)}, "cannot read .*none.txt"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_pairs(dataclasses.replace(PAIRS, **change), t5_folder, pairs_data, tmp_path)
    with pytest.raises(ConfigError, match="pairs of sources and targets are for encoder-decoders"):
        run_pairs(PAIRS, model, pairs_data, tmp_path)
    switch = write_random_folder(tmp_path / "switch", pairs_data, SWITCH)
    with pytest.raises(ConfigError, match="levels of an encoder-decoder with experts: not yet"):
        run_pairs(PAIRS, switch, pairs_data, tmp_path)
    bart = dataclasses.replace(tiny_recipe(T5).cfg, model_type="bart")
    with pytest.raises(ConfigError, match="trained of t5, mt5, switch_transformers, and this is bart"):
        require_trainable(bart, PAIRS, "levels")
