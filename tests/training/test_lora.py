"""Training an adapter: it learns, the model does not change, and the folder at the end is used."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxllm.checkpoints.peft_folder import read_adapter
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.lora import LoraConfig
from tests.tiny import TINY, write_tiny_bundle, write_tiny_folder
from training.loop import Trainer
from training.lora import FrozenModel, LoraRecipe, load_lora_recipe, lora_job, lora_recipe_names, train_lora
from training.parallel import MeshShape, make_mesh
from training.recipe import Source

QUIET = Console(quiet=True)
ONE = MeshShape(data=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "tasks" / "sst2").mkdir(parents=True)
    records = [{"text": f"film {i}", "label": ("positive", "negative")[i % 2]} for i in range(80)]
    (folder / "tasks" / "sst2" / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = Source(task="sentiment", prompt_weight=0.0)
    return folder, LoraRecipe(
        steps=40,
        batch=2,
        row_tokens=128,
        peak_learning_rate=2e-2,
        warmup_steps=2,
        checkpoint_steps=20,
        log_steps=20,
        lora=LoraConfig(rank=4, alpha=8),
        sources=(source,),
        held_out_share=0.1,
    )


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_an_adapter_learns_over_every_width(model, recipe, tmp_path, weights):
    data, recipe = recipe
    folder = train_lora(
        recipe, model, tmp_path / "run", data=data, weights=weights, mesh_shape=ONE, console=QUIET
    )
    losses = json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]
    assert losses["with"] < 0.8 * losses["without"]
    lora, adapter = read_adapter(folder, TINY)
    assert (lora.rank, lora.alpha, set(lora.targets)) == (4, 8, set(LoraConfig.targets))
    assert all(np.abs(value).max() > 0 for value in adapter.values())
    # The run is over: nothing is trained again, and the same is written.
    before = (folder / "adapter_model.safetensors").read_bytes()
    train_lora(recipe, model, tmp_path / "run", data=data, weights=weights, mesh_shape=ONE, console=QUIET)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    other = dataclasses.replace(recipe, lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="another run"):
        train_lora(other, model, tmp_path / "run", data=data, mesh_shape=ONE, console=QUIET)


def test_only_the_adapter_is_trained(model, recipe):
    _, recipe = recipe
    frozen = FrozenModel.read(model)
    trainer = Trainer(lora_job(frozen.cfg, frozen.params, recipe), recipe, make_mesh(ONE, 2))
    state = trainer.initial()
    assert {name.rpartition(".")[2] for name in state.params} == {"left", "right"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in state.params.values())


def test_a_bundle_is_trained_on_as_it_is(recipe, tmp_path):
    bundle = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    assert FrozenModel.read(bundle).name == "tiny"
    with pytest.raises(ConfigError, match="has int8 weights"):
        FrozenModel.read(bundle, "int4")
    with pytest.raises(CheckpointError):
        FrozenModel.read(tmp_path / "none.jaxllm")
    data, recipe = recipe
    with pytest.raises(ConfigError, match="at most the model's window"):
        train_lora(
            dataclasses.replace(recipe, row_tokens=129), bundle, tmp_path / "run", data=data, console=QUIET
        )


@pytest.mark.parametrize("name", lora_recipe_names())
def test_packaged_recipes_load_and_read_back(name):
    recipe = load_lora_recipe(name)
    assert LoraRecipe.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"ranks": 3}}, "malformed lora"),
        ({"lora": {"targets": ["attn.z"]}}, "no targets attn.z"),
        ({"sources": []}, "at least one source"),
        ({"speed": 3}, "unknown recipe key speed"),
    ],
)
def test_a_malformed_recipe_names_the_key(change, message):
    plain = load_lora_recipe("mood").to_json()
    with pytest.raises(ConfigError, match=message):
        LoraRecipe.from_json({**plain, **change})
    with pytest.raises(ConfigError, match="the recipes are mood"):
        load_lora_recipe("none")
