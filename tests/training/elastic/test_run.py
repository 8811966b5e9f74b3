"""From a folder to an elastic bundle: every step once, resumed, and served as it was measured."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import jaxllm.training.elastic.tiny_lm.run
from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_ladder, read_order, read_recovery, read_tiny_lm
from jaxllm.bundle.writer import stored_form
from jaxllm.cli import train as elasticize_cli
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import layer_parameters, sub_config
from jaxllm.elastic.slo import marks
from jaxllm.elastic.units import reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.decoder import forward_documents
from jaxllm.models.lora import LoraConfig
from jaxllm.models.parameters import param_specs
from jaxllm.models.tiny_lm import forward_both
from jaxllm.quant import dequantize
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic import importance, recovery
from jaxllm.training.elastic.job import ElasticRecipe
from jaxllm.training.elastic.run import elasticize
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe, TinyLmRun
from jaxllm.training.loop import losses
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_folder
from tests.training.tiny_runs import ONE, SILENT, TLM_RECIPE

TOKENS = np.arange(40, dtype=np.int32).reshape(2, 20) * 6


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    monkeypatch.setattr(importance, "LEAST_TOKENS", 64)


RECIPE = ElasticRecipe(
    steps=12,
    batch=2,
    row_tokens=128,
    peak_learning_rate=2e-2,
    warmup_steps=2,
    checkpoint_steps=6,
    log_steps=6,
    lora=LoraConfig(rank=2, alpha=4),
    sources=(Source(task="sentiment"),),
    held_out_share=0.1,
    levels=(50, 100),
    anchor_share=0.5,
    calibration_tokens=512,
)


def run(recipe, model, data, folder, *, weights=None, tlm=None, encoder=None, **options):
    return elasticize(
        recipe,
        model,
        BundleOutput(folder / "out.jaxllm", weights),
        folder / "run",
        data=data,
        tiny_lm=None if tlm is None else TinyLmRun(tlm, encoder),
        mesh_shape=ONE,
        monitoring=SILENT,
        **options,
    )


QUICK = dataclasses.replace(RECIPE, recovery="none")


@pytest.fixture(scope="module")
def plain(model, data, tmp_path_factory):
    """The folder of a run without recovery, and of its bundle."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importance, "LEAST_TOKENS", 64)
        run(QUICK, model, data, folder)
    return folder


@pytest.mark.slow
def test_levels_are_recovered_and_nothing_is_done_twice(model, data, tmp_path, monkeypatch):
    weights = "int8"
    facts = run(RECIPE, model, data, tmp_path, weights=weights)
    half = facts["levels"]["50"]
    assert half["recovered"] < half["held_out"] - 0.1
    assert set(facts["levels"]["100"]) == {"share", "held_out"}
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        ladder = read_ladder(bundle)
        assert ladder is not None
        assert (ladder.levels, len(ladder.anchors)) == ((50, 100), 1)
        assert bundle.layout.weights == weights
        found = read_recovery(bundle, 50)
        assert found is not None
        assert found.scaling == 2.0
        share = layer_parameters(sub_config(TINY, ladder, 50)) / layer_parameters(TINY)
        assert half["share"] == share
        assert bundle.layout.parts["elastic"].facts["levels"] == facts["levels"]
        # The whole model is what it was, bit for bit, in another order.
        order, stored = read_order(bundle), bundle.load()
        assert order is not None
        for name, value in reorder(TINY, tiny_params().items(), order):
            wanted = stored_form(value, param_specs(TINY)[name], weights)
            for one, other in zip(jax.tree.leaves(stored[name]), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=name)
    written = (tmp_path / "out.jaxllm").read_bytes()
    monkeypatch.setattr(recovery, "measure", None)
    assert run(RECIPE, model, data, tmp_path, weights=weights) == facts
    assert (tmp_path / "out.jaxllm").read_bytes() == written
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == facts


@pytest.mark.slow
def test_the_whole_model_is_what_it_was(plain):
    with Bundle.open(plain / "out.jaxllm") as bundle:
        params = bundle.load()
        assert read_recovery(bundle, 50) is None
    before, after = (forward_documents(each, TOKENS, cfg=TINY) for each in (tiny_params(), params))
    np.testing.assert_allclose(np.asarray(after), np.asarray(before), atol=1e-4)
    moved = {
        name
        for name, value in params.items()
        if not np.array_equal(dequantize(value, np.float32), tiny_params()[name])
    }
    assert "layers.0.ffn.up" in moved


@pytest.mark.slow
@pytest.mark.parametrize("order", ["magnitude", "random"])
def test_other_orders_are_the_same_whole_model(model, data, tmp_path, plain, order):
    (tmp_path / "run").mkdir()
    shutil.copy(plain / "run" / "importance.npz", tmp_path / "run")
    run(dataclasses.replace(QUICK, order=order), model, data, tmp_path)
    bundles = [Bundle.open(folder / "out.jaxllm") for folder in (plain, tmp_path)]
    ups = [np.asarray(each.load()["layers.0.ffn.up"]) for each in bundles]
    assert not np.array_equal(*ups)
    np.testing.assert_array_equal(*(np.sort(up, axis=0) for up in ups))
    assert bundles[1].layout.parts["elastic"].facts["order"] == order


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


@pytest.mark.slow
def test_a_vocabulary_of_128k_tokens(data, tmp_path, monkeypatch):
    # As many logits as real rows have are computed by blocks.
    monkeypatch.setattr(losses, "WHOLE_LOGITS_BYTES", 0)
    cfg = dataclasses.replace(TINY, vocab_size=128256, hidden_size=16)
    files = tiny_tokenizer()
    parts = json.loads(files.tokenizer_json)
    first = max(each["id"] for each in parts["added_tokens"]) + 1
    parts["model"]["vocab"] |= {f"piece{id_}": id_ for id_ in range(first, cfg.vocab_size)}
    files = dataclasses.replace(files, tokenizer_json=json.dumps(parts))
    folder = write_tiny_folder(tmp_path / "wide", cfg=cfg, params=tiny_params(cfg), tokenizer=files)
    short = {"steps": 1, "batch": 1, "row_tokens": 64, "warmup_steps": 0, "calibration_tokens": 64}
    facts = run(dataclasses.replace(RECIPE, **short, recovery="joint"), folder, data, tmp_path)
    assert all(0 < each["held_out"] < 20 for each in facts["levels"].values())
    with Bundle.open(tmp_path / "out.jaxllm") as bundle:
        assert bundle.cfg.vocab_size == 128256


def stop(*_, **__):
    raise AssertionError("this was done before")


@pytest.mark.slow
def test_a_tiny_lm_goes_with_the_adapters_that_it_was_trained_beside(model, data, tmp_path, monkeypatch):
    folder, shorter = tmp_path / "run", dataclasses.replace(RECIPE, steps=6)
    run(shorter, model, data, tmp_path, tlm=TLM_RECIPE)
    path = tmp_path / "out.jaxllm"
    with Bundle.open(path) as bundle:
        ladder, tiny = read_ladder(bundle), read_tiny_lm(bundle)
        assert ladder is not None
        assert tiny is not None
        assert tiny.levels == ladder.levels == (50, 100)
        assert tiny.prompt_ratios == TLM_RECIPE.prompt_ratios
        tokens = np.array([[*tiny.mark_ids[:2], 5, 6, 7]], np.int32)
        # It is stored in float32 beside a model of any width.
        params = {name: np.array(value) for name, value in tiny.params.items()}
        keep, (level, prompt) = forward_both(params, tokens, np.ones((1, 5), bool), cfg=tiny.cfg)
        assert (keep.shape, level.shape, prompt.shape) == ((1, 5), (1, 2), (1, 3))
        bundle.verify()

    # The same again: read, not done.
    written = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "measure", stop)
        patch.setattr(jaxllm.training.elastic.tiny_lm.run, "answer", stop)
        run(shorter, model, data, tmp_path, tlm=TLM_RECIPE)
    assert path.read_bytes() == written

    # More steps: importance is known, the adapters go on, and to others belongs another tiny LM.
    monkeypatch.setattr(recovery, "measure", stop)
    (before,) = folder.glob("tlm-*")
    run(RECIPE, model, data, tmp_path, tlm=TLM_RECIPE)
    metrics = (folder / "levels" / "50" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [6, 12]
    assert len(list(folder.glob("tlm-*"))) == 2
    assert path.read_bytes() != written
    assert before.exists()


def test_what_the_tiny_lm_lacks_is_said_before_the_work(model, data, tmp_path):
    for change, how, message in (
        ({"compressions": ("none.jsonl",)}, {}, r"cannot read .*none\.jsonl"),
        ({"tasks": ("news",)}, {}, "cannot read .*agnews"),
        ({"encoder": None}, {}, "no encoder"),
        ({}, {"encoder": tmp_path / "nowhere"}, "nowhere"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            run(RECIPE, model, data, tmp_path, tlm=dataclasses.replace(TLM_RECIPE, **change), **how)
    with pytest.raises(ConfigError, match="say with --data"):
        run(RECIPE, model, None, tmp_path, tlm=TLM_RECIPE)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command(model, data, tmp_path, monkeypatch):
    # Devices are made once in a process.
    monkeypatch.setattr(elasticize_cli, "set_devices", lambda devices: None)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        "steps = 9\nbatch = 1\nrow_tokens = 300\npeak_learning_rate = 1e-2\ncalibration_tokens = 512\n"
        "held_out_share = 0.1\n[[sources]]\ntask = 'sentiment'\n"
    )
    out = tmp_path / "out.jaxllm"
    plain = [str(model), "-o", str(out), "--recipe", str(recipe), "--data", str(data), "--tiny-lm", "none"]
    plain += ["--run", str(tmp_path / "run"), "--mesh", "data=1", "--recovery", "none"]
    chosen = ["--levels", "30,100", "--anchor-share", "50%", "--order", "magnitude", "--weights", "int8"]
    result = CliRunner().invoke(cli, ["elasticize", *plain, *chosen, "--steps", "3", "--name", "mini"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["bundle"] == str(out)
    assert list(told["levels"]) == ["30", "100"]
    assert len(told["anchors"]) == 1
    with Bundle.open(out) as bundle:
        assert (bundle.layout.name, bundle.layout.weights) == ("mini", "int8")
        assert bundle.layout.parts.keys() == {"elastic"}
        assert bundle.layout.parts["elastic"].facts["order"] == "magnitude"
    recipe_of_run = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert (recipe_of_run["steps"], recipe_of_run["recovery"]) == (3, "none")
    # The model's window, and as many more rows.
    assert (recipe_of_run["row_tokens"], recipe_of_run["batch"]) == (128, 2)
    for levels, message in (("30,x", "no level"), ("30", "end with 100")):
        result = CliRunner().invoke(cli, ["elasticize", *plain, "--levels", levels])
        assert result.exit_code != 0
        assert message in result.output + str(result.exception)


@pytest.mark.slow
def test_the_command_takes_texts_instead_of_the_recipes_sources(model, tmp_path, monkeypatch):
    monkeypatch.setattr(elasticize_cli, "set_devices", lambda devices: None)
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"The {i} hills and the {i} tales of them." for i in range(60)))
    out, folder = tmp_path / "out.jaxllm", tmp_path / "run"
    plain = ["elasticize", str(model), "-o", str(out), "--run", str(folder), "--mesh", "data=1"]
    plain += ["--text", str(text), "--levels", "50,100", "--steps", "1"]
    result = CliRunner().invoke(cli, plain)
    assert "leave it out (--tiny-lm none)" in result.output + str(result.exception)
    result = CliRunner().invoke(cli, [*plain, "--tiny-lm", "none"])
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "recipe.json").read_text())["recipe"]["sources"][0]["text"] == str(text)
    with Bundle.open(out) as bundle:
        assert read_ladder(bundle) is not None


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


def test_unusable_inputs(model, data, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="is no Hugging Face folder"):
        run(RECIPE, tmp_path / "nothing", data, tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        BundleOutput(tmp_path / "no" / "out.jaxllm")
    monkeypatch.setattr(importance, "LEAST_TOKENS", 10**6)
    with pytest.raises(ConfigError, match="the calibration text has"):
        run(RECIPE, model, data, tmp_path)
    assert not (tmp_path / "out.jaxllm").exists()


def test_damaged_importance_is_named(model, data, tmp_path, plain):
    shutil.copytree(plain / "run", tmp_path / "run")
    (tmp_path / "run" / "importance.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"importance\.npz.*remove it"):
        run(QUICK, model, data, tmp_path)


def test_recipes():
    names = "adapters", "equal-time", "family", "large", "quick", "translate"
    assert ElasticRecipe.names() == list(names)
    recipe, together, family, large, quick, translate = map(ElasticRecipe.load, names)
    assert (large.precision, large.remat, large.whole_kl_nats > 0) == ("bfloat16", "full", True)
    assert [len(source.pairs) for source in translate.sources] == [2, 2]
    assert quick.levels == TinyLmRecipe.load("quick").levels
    # What is compared differs in how levels recover, and in the steps that take as long.
    differing = {name for name, value in recipe.to_json().items() if value != together.to_json()[name]}
    assert differing == {"recovery", "steps", "peak_learning_rate"}
    assert (recipe.optimizer, recipe.lora.rank, recipe.levels[0]) == ("adamw", 8, 20)
    differing = {name for name, value in together.to_json().items() if value != family.to_json()[name]}
    assert differing == {"optimizer", "steps"}
    assert ElasticRecipe.from_json(recipe.to_json()) == recipe
    for change, message in [
        ({"levels": [50]}, "end with 100"),
        ({"levels": 3}, "levels must be a list, got 3"),
        ({"anchor_share": 2}, "anchor_share"),
        ({"recovery": "magic"}, "recovery must be"),
        ({"order": "alphabet"}, "order must be"),
        ({"importance": "alphabet"}, "importance must be"),
        ({"recovery": "lora", "whole_kl_nats": 0.1}, "bounds a joint recovery"),
        ({"calibration_tokens": 0}, "calibration_tokens"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ElasticRecipe.from_json({**recipe.to_json(), **change})
