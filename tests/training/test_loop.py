"""The loop and its recipe: learning, exact resumption, validation, and the folder at the end."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.tokenizer import Tokenizer
from training import loop
from training.data import TrainingWindows
from training.pretrain import best_params, export_best, pretrain
from training.recipe import Recipe, load_recipe, recipe_names

SMOKE = load_recipe("smoke")
# One layer: these tests spend their time on compilation.
SMOKE = dataclasses.replace(SMOKE, model=dataclasses.replace(SMOKE.model, layers=1, attention_windows=()))
# A row with something to learn: each token follows from the one before.
TOKENS = ((np.arange(3000) * 7) % 61).astype(np.uint16)
HELD_OUT = TOKENS[:150]


def train(recipe, folder, report=lambda progress: None):
    windows = TrainingWindows(TOKENS, recipe.window_tokens, recipe.batch, recipe.seed)
    return loop.train(recipe, windows.batch_at, HELD_OUT, folder, report)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_loss_falls_and_the_best_checkpoint_is_kept(tmp_path):
    recipe = dataclasses.replace(SMOKE, steps=60, checkpoint_steps=20, log_steps=5, peak_learning_rate=1e-2)
    seen = []
    train(recipe, tmp_path, seen.append)
    assert [each.step for each in seen] == list(range(5, 61, 5))
    assert seen[-1].loss < 0.5 * seen[0].loss
    held_out = {each.step: each.held_out_loss for each in seen if each.held_out_loss is not None}
    assert list(held_out) == [20, 40, 60]
    with loop.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 60
        assert checkpoints.best() == min(held_out.items(), key=lambda item: item[1])


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    whole = train(SMOKE, tmp_path / "whole")

    def kill(progress):
        if progress.step == 5:  # Checkpoints are at 2, 4 and 6.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SMOKE, tmp_path / "killed", kill)
    steps = []
    resumed = train(SMOKE, tmp_path / "killed", lambda progress: steps.append(progress.step))
    assert steps == [5, 6]
    assert_same_bits(resumed, whole)
    # Nothing is left to do, and nothing changes.
    assert_same_bits(train(SMOKE, tmp_path / "killed", kill), whole)


def test_the_best_checkpoint_outlives_later_ones(tmp_path):
    state = loop.initial_state(SMOKE)
    with loop.Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="train first"):
            checkpoints.best()
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.6), start=1):
            checkpoints.save(state.replace(step=np.int32(step)), loss)
        assert checkpoints.best() == (2, 1.0)
        assert checkpoints.latest() == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_weight_decay_is_on_matrices_only():
    params = loop.initial_state(SMOKE).params
    decayed = loop.decays({**params, "layers.0.attn.q_bias": None, "final_norm.bias": None})
    assert decayed["layers.0.attn.q"]
    assert decayed["embed.tokens"]
    for name in ("final_norm.scale", "layers.0.ffn_norm.scale", "layers.0.attn.q_bias", "final_norm.bias"):
        assert not decayed[name]
    # With no gradient, one step at a rate of 1 shrinks exactly the decayed ones.
    recipe = dataclasses.replace(SMOKE, peak_learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    optimizer = loop.make_optimizer(recipe)

    @jax.jit
    def updates_without_gradient(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(zeros, optimizer.init(params), params)[0]

    updates = updates_without_gradient(params)
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.05 * params[name] if decayed[name] else 0 * update)


def test_learning_rate_warms_up_then_falls_on_a_cosine():
    recipe = dataclasses.replace(
        SMOKE, steps=110, warmup_steps=10, peak_learning_rate=1.0 - 1e-9, final_learning_rate_share=0.2
    )
    rates = [float(loop.learning_rate(recipe)(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(rates, [1 / 11, 1 / 11 + 5 / 11, 1.0, 0.6, 0.2], rtol=1e-5)


def test_held_out_loss_does_not_depend_on_how_it_is_batched():
    params = loop.initial_state(SMOKE).params
    losses = [
        loop.evaluate(params, HELD_OUT[:101], recipe=recipe)
        for recipe in (SMOKE, dataclasses.replace(SMOKE, batch=1), dataclasses.replace(SMOKE, batch=3))
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    # An untrained model knows nothing: the loss is near that of a uniform guess.
    assert losses[0] == pytest.approx(np.log(SMOKE.model.vocab_size), rel=0.02)


def test_a_diverged_run_stops(tmp_path, monkeypatch):
    initial_state = loop.initial_state

    def poisoned(recipe):
        state = initial_state(recipe)
        state.params["final_norm.scale"] *= np.float32(np.nan)
        return state

    monkeypatch.setattr(loop, "initial_state", poisoned)
    with pytest.raises(JaxllmError, match="loss is nan at step 1"):
        train(SMOKE, tmp_path)


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipes_load_and_read_back(name):
    recipe = load_recipe(name)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert hash(recipe) == hash(load_recipe(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lerning_rate": 1.0}, "unknown recipe key lerning_rate"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"batch": 2.5}, "batch"),
        ({"window_tokens": 64}, "at most the model's window"),
        ({"held_out_share": 1}, "held_out_share must be a number above 0 and below 1"),
        ({"peak_learning_rate": "fast"}, "peak_learning_rate"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"chat_template": 3}, "chat_template must be text"),
        ({"model": 3}, "model must be a table"),
    ],
)
def test_a_malformed_recipe_names_the_key(change, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.from_json({**SMOKE.to_json(), **change})


def test_recipes_are_found_by_name_or_path(tmp_path):
    with pytest.raises(ConfigError, match="the recipes are smoke, stories"):
        load_recipe("story")
    path = tmp_path / "mine.toml"
    path.write_text("steps = 3\nsteps = 4\n")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load_recipe(str(path))
    path.write_text("steps = 3\n")
    with pytest.raises(ConfigError, match="lacks batch, chat_template, model"):
        load_recipe(str(path))


def test_pretrain_ends_with_a_hugging_face_folder(tmp_path):
    run, valid = tmp_path / "run", tmp_path / "valid.txt"
    valid.write_text("Assignments bind names to values.\n\nThe if statement chooses.\n")
    console = Console(quiet=True)
    folder = pretrain(SMOKE, (), run, valid_paths=[valid], console=console)
    assert folder == run / "hf"
    params, step, _ = best_params(run, SMOKE)

    cfg = read_config(folder)
    assert cfg == SMOKE.model
    written = dict(read_params(folder, cfg))
    assert_same_bits(written, {name: params[name] for name in written})
    files = read_tokenizer(folder)
    assert (files.eos_ids, files.bos_id) == ((0,), None)
    prompt = Tokenizer(files).render_chat(
        [{"role": "user", "content": "Once "}, {"role": "assistant", "content": "upon"}]
    )
    assert prompt == "Once upon"

    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens_seen"] == step * SMOKE.batch * SMOKE.window_tokens
    valid_summary = summary["valid"]
    assert valid_summary["documents"] == 2
    assert valid_summary["nats_per_byte"] == pytest.approx(
        valid_summary["nats_per_token"] * (valid_summary["tokens"] - 1) / valid_summary["bytes"]
    )
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [1, 2, 3, 4, 5, 6]

    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert export_best(run) == folder
    assert (folder / "model.safetensors").read_bytes() == weights

    # The folder goes on with its own run, and refuses another.
    longer = dataclasses.replace(SMOKE, steps=7)
    pretrain(longer, (), run, console=console)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 7
    with pytest.raises(ConfigError, match="differs in seed, the training text"):
        pretrain(dataclasses.replace(longer, seed=1), [valid], run, console=console)


def test_a_run_that_cannot_start_does_not_claim_its_folder(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("a\n\nb\n\nc\n")
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="enough distinct pieces"):
        pretrain(SMOKE, [text], run, console=Console(quiet=True))
    small = dataclasses.replace(SMOKE, model=dataclasses.replace(SMOKE.model, vocab_size=258))
    with pytest.raises(ConfigError, match="training tokens are too few"):
        pretrain(small, [text], run, console=Console(quiet=True))
    with pytest.raises(CheckpointError, match="not the folder"):
        export_best(run)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not the folder of a pretraining run"):
        export_best(tmp_path)
