"""From a folder to an elastic bundle: every step once, resumed, and served as it was measured."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import jaxllm.training.elastic.run
import jaxllm.training.elastic.tiny_lm.run
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_ladder, read_order, read_recovery
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.bundle.writer import stored_form
from jaxllm.elastic.ladder import layer_parameters, sub_config
from jaxllm.elastic.slo import marks
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.models.parameters import param_specs
from jaxllm.models.tiny_lm import forward_both
from jaxllm.quant import dequantize
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.job import ElasticRecipe
from jaxllm.training.elastic.run import elasticize
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe, TinyLmRun
from tests.tiny import TINY, tiny_params, write_tiny_folder
from tests.training.tiny_runs import TLM_RECIPE, quiet


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(importance, "LEAST_TOKENS", 64)


RECIPE = ElasticRecipe(
    steps=12, batch=2, row_tokens=128, peak_learning_rate=2e-2, warmup_steps=2, checkpoint_steps=6,
    log_steps=6,
    lora=LoraConfig(rank=2, alpha=4), sources=(Source(task="sentiment"),), held_out_share=0.1,
    levels=(50, 100), anchor_share=0.5, calibration_tokens=512,
)  # fmt: skip


def run(recipe, model, data, folder, *, weights=None, tlm=None, encoder=None):
    out = BundleOutput(folder / "out.jaxllm", weights)
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
            wanted = stored_form(value, param_specs(TINY)[name], "int8")
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
def test_another_order_is_the_same_whole_model(plain):
    with Bundle.open(plain / "out.jaxllm") as bundle:
        up, before = np.array(bundle.load()["layers.0.ffn.up"]), tiny_params()["layers.0.ffn.up"]
        assert read_recovery(bundle, 50) is None
        assert bundle.layout.parts["elastic"].facts["order"] == "random"
    assert not np.array_equal(up, before)
    np.testing.assert_array_equal(np.sort(up, axis=0), np.sort(before, axis=0))


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


@pytest.mark.slow
def test_a_model_of_another_family_becomes_elastic_by_the_packaged_recipes(data_dir, tmp_path):
    """Of a window and a vocabulary that the packaged family does not have."""
    recipe = dataclasses.replace(
        ElasticRecipe.load("family"), recovery="none", levels=(50, 100), calibration_tokens=2048,
        sources=(Source(task="ui-step"),),
    )  # fmt: skip
    tlm = TinyLmRecipe.load("small")
    short = {"steps": 2, "checkpoint_steps": 2}
    tlm = dataclasses.replace(
        tlm, score=dataclasses.replace(tlm.score, **short), decide=dataclasses.replace(tlm.decide, **short),
        compressions=("tasks/compression/google.jsonl",), tasks=("ui-step",), questions=8, held_out_share=0.3,
    )  # fmt: skip
    facts = run(recipe, data_dir / "models" / "stories260K", data_dir, tmp_path, weights="int8", tlm=tlm)
    assert set(facts["levels"]) == {"50", "100"}
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        tiny = read_tiny_lm(bundle)
        assert tiny is not None
        assert tiny.row_tokens == 256
        assert tiny.cfg.encoder.vocab_size == 512 + len(marks())


def test_a_folder_of_another_run_is_refused(model, data, tmp_path, plain):
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


def test_unusable_inputs(model, data, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="is no Hugging Face folder"):
        run(RECIPE, tmp_path / "nothing", data, tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        BundleOutput(tmp_path / "no" / "out.jaxllm")
    monkeypatch.setattr(importance, "LEAST_TOKENS", 10**6)
    with pytest.raises(ConfigError, match="the calibration text has"):
        run(RECIPE, model, data, tmp_path)
    assert not (tmp_path / "out.jaxllm").exists()
