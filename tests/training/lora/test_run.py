"""Training an adapter: it learns, the model does not change, and the folder at the end is used."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxllm.checkpoints.peft import read_adapter
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.loop.parallel import make_mesh
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.lora.run import LoraRecipe, lora_job, train_lora
from tests.tiny import TINY, write_tiny_bundle
from tests.training.tiny_runs import ONE, quiet

RECIPE = LoraRecipe(
    steps=40, batch=2, row_tokens=128, peak_learning_rate=2e-2, warmup_steps=2, checkpoint_steps=20,
    log_steps=20, lora=LoraConfig(rank=4, alpha=8), sources=(Source(task="sentiment", prompt_weight=0.0),),
    held_out_share=0.1,
)  # fmt: skip


def run(recipe, model, data, folder, **options):
    return train_lora(recipe, model, quiet(folder, data), **options)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_an_adapter_learns_over_every_width(model, data, tmp_path, weights):
    folder = run(RECIPE, model, data, tmp_path / "run", weights=weights)
    losses = json.loads((tmp_path / "run" / "summary.json").read_text())["held_out"]
    assert losses["with"] < 0.8 * losses["without"]
    lora, adapter = read_adapter(folder, TINY)
    own = {each for each in LoraConfig.targets if not each.startswith("cross.")}
    assert (lora.rank, lora.alpha, set(lora.targets)) == (4, 8, own)
    assert all(np.abs(value).max() > 0 for value in adapter.values())
    # The run is over: nothing is trained again, and the same is written.
    before = (folder / "adapter_model.safetensors").read_bytes()
    run(RECIPE, model, data, tmp_path / "run", weights=weights)
    assert (folder / "adapter_model.safetensors").read_bytes() == before
    other = dataclasses.replace(RECIPE, lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match="another run"):
        run(other, model, data, tmp_path / "run")


@pytest.mark.slow
def test_a_run_goes_on_to_more_steps(model, data, tmp_path):
    """And is then the longer run, where learning rates still warm up and do not depend on its length."""
    longer = dataclasses.replace(RECIPE, steps=4, warmup_steps=4, checkpoint_steps=2, log_steps=2)
    half = dataclasses.replace(longer, steps=2)
    run(half, model, data, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_text()
    run(longer, model, data, tmp_path / "run")
    assert metrics.read_text().startswith(before)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [2, 4]
    again = run(longer, model, data, tmp_path / "whole")
    written = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (again / "adapter_model.safetensors").read_bytes() == written
    # The folder stays the shorter run's, which then has nothing left to do.
    run(half, model, data, tmp_path / "run")
    assert len(metrics.read_text().splitlines()) == 2


def test_a_bundle_is_trained_on_as_it_is(data, tmp_path):
    bundle = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8")
    assert FrozenModel.read(bundle).name == "tiny"
    with pytest.raises(ConfigError, match="has int8 weights"):
        FrozenModel.read(bundle, "int4")
    with pytest.raises(CheckpointError):
        FrozenModel.read(tmp_path / "none.jaxllm")


def test_only_the_adapter_is_trained_on_rows_no_longer_than_the_models_window(model):
    frozen = FrozenModel.read(model)
    recipe = dataclasses.replace(RECIPE, batch=1, row_tokens=300)
    assert recipe.within(300) is recipe
    recipe = recipe.within(frozen.cfg.window_tokens)
    # As many tokens, in more rows.
    assert (recipe.row_tokens, recipe.batch) == (128, 2)
    trainer = Trainer(lora_job(frozen.cfg, frozen.params, recipe), recipe, make_mesh(ONE, 2))
    state = trainer.initial()
    assert {name.rpartition(".")[2] for name in state.params} == {"left", "right"}
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in state.params.values())
