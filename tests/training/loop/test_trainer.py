"""The loop: learning, exact resumption, accumulation, precision, and what it refuses."""

import dataclasses
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.training.data.packing import PackedBatches
from jaxllm.training.loop import trainer as loop
from jaxllm.training.loop.checkpoints import Checkpoints
from jaxllm.training.loop.hardware import memory_told, what_to_change
from jaxllm.training.loop.monitoring import StepTrace
from jaxllm.training.loop.optimizer import decays, learning_rate, make_optimizer, matrices
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.job import pretrain_job
from tests.training.jobs import (
    DOCUMENTS,
    SMOKE,
    assert_same_bits,
    held_out_of,
    one_device,
    poisoned,
    train,
)


def initial_state(recipe):
    return Trainer(pretrain_job(recipe), recipe, one_device()).initial()


def test_loss_falls_and_the_best_checkpoint_is_kept(tmp_path):
    recipe = dataclasses.replace(SMOKE, steps=60, checkpoint_steps=20, log_steps=5, peak_learning_rate=1e-2)
    seen = []
    train(recipe, tmp_path, seen.append)
    assert [each.step for each in seen] == list(range(5, 61, 5))
    assert seen[-1].loss < 0.5 * seen[0].loss
    held_out = {each.step: each.held_out_loss for each in seen if each.held_out_loss is not None}
    assert list(held_out) == [20, 40, 60]
    assert seen[-1].held_out_by_source == {0: pytest.approx(held_out[60])}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 60
        assert checkpoints.best() == min(held_out.items(), key=lambda item: item[1])


def test_held_out_losses_are_of_few_batches(tmp_path):
    losses = []
    for most in (1, 0):
        recipe = dataclasses.replace(SMOKE, batch=1, steps=1, evaluation_batches=most)
        train(recipe, tmp_path / str(most), lambda progress: losses.append(progress.held_out_loss))
    trainer = Trainer(pretrain_job(recipe), recipe, one_device())
    with Checkpoints(tmp_path / "0") as checkpoints:
        params = checkpoints.restore(1, trainer.abstract()).params
    each = [trainer.evaluate(params, [batch])[0] for batch in held_out_of(recipe)()]
    assert losses[0] == pytest.approx(each[len(each) // 2])
    assert losses[1] == pytest.approx(trainer.evaluate(params, held_out_of(recipe)())[0])


def test_a_trace_has_the_steps_after_the_first_two(tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: events.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))

    def run(steps, folder="traces"):
        events.clear()
        with StepTrace(folder) as trace:
            trace.expect(steps)
            for number in range(steps):
                with trace.step(number):
                    events.append(number)
                trace.finish(jnp.zeros(()))
        return list(events)

    assert run(7) == [0, 1, "traces", 2, 3, 4, "stop", 5, 6]
    assert run(3) == [0, 1, "traces", 2, "stop"]
    assert run(3, None) == [0, 1, 2]
    with pytest.raises(ConfigError, match="and 2 are left: train more"):
        run(2)


@pytest.mark.slow
def test_a_run_is_traced(tmp_path):
    batches = PackedBatches(DOCUMENTS, (), SMOKE.row_tokens, SMOKE.batch, SMOKE.seed)
    trainer = Trainer(pretrain_job(SMOKE), SMOKE, one_device())
    run = loop.train(
        trainer, batches.batch_at, held_out_of(SMOKE), tmp_path / "run", lambda progress: None,
        profile=tmp_path / "trace",
    )  # fmt: skip
    assert int(run.step) == SMOKE.steps
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path):
    whole = train(SMOKE, tmp_path / "whole")

    def interrupt(progress):
        if progress.step == 5:  # Checkpoints are at 2, 4 and 6.
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SMOKE, tmp_path / "killed", interrupt)
    steps = []
    resumed = train(SMOKE, tmp_path / "killed", lambda progress: steps.append(progress.step))
    assert steps == [5, 6]
    assert_same_bits(resumed, whole)
    # Nothing is left to do, and nothing changes.
    assert_same_bits(train(SMOKE, tmp_path / "killed", interrupt), whole)


KILLED_RUN = """
import dataclasses, sys
from pathlib import Path
from tests.training.jobs import SMOKE, train
recipe = dataclasses.replace(SMOKE, steps=60, checkpoint_steps=7, log_steps=1)
train(recipe, Path(sys.argv[1]), lambda progress: print(progress.step, flush=True))
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(tmp_path):
    recipe = dataclasses.replace(SMOKE, steps=60, checkpoint_steps=7, log_steps=1)
    whole = train(recipe, tmp_path / "whole")
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path / "killed")]
    last = 0
    for at in (9, 21, 30):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = None
            for line in process.stdout:
                first = int(line) if first is None else first
                last = int(line)
                if last >= at:
                    # Perhaps in the middle of writing a checkpoint: step 21 begins one.
                    os.kill(process.pid, signal.SIGKILL)
                    break
        assert first is not None
        assert first <= at
    assert last < 60
    resumed = train(recipe, tmp_path / "killed")
    assert_same_bits(resumed, whole)


def test_the_best_checkpoint_outlives_later_ones(tmp_path):
    state = initial_state(SMOKE)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="train first"):
            checkpoints.best()
        for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, 2.6), start=1):
            checkpoints.save(dataclasses.replace(state, step=jnp.int32(step)), loss)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.best() == (2, 1.0)
        assert checkpoints.latest() == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_a_checkpoint_in_writing_does_not_see_the_next_steps(tmp_path):
    trainer = Trainer(pretrain_job(SMOKE), SMOKE, one_device())
    state = trainer.initial()
    before = jax.tree.map(np.array, state)
    batches = PackedBatches(*(_batches_of(SMOKE)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1.0)
        for step in range(3):
            state, _ = trainer.step(state, batches.batch_at(step))
    with Checkpoints(tmp_path) as checkpoints:
        assert_same_bits(checkpoints.restore(0, trainer.abstract()), before)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told(tmp_path):
    train(dataclasses.replace(SMOKE, steps=2), tmp_path)
    for file in (tmp_path / "2").rglob("*"):
        if file.is_file() and "metrics" not in str(file):
            file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="remove it to go on"):
        train(SMOKE, tmp_path)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_weight_is_no_step(tmp_path, accumulate):
    recipe = dataclasses.replace(SMOKE, steps=3, checkpoint_steps=3, log_steps=1, accumulate=accumulate)
    batches = PackedBatches(*_batches_of(recipe))
    trainer, seen = Trainer(pretrain_job(recipe), recipe, one_device()), []

    def batch_at(step):
        batch = batches.batch_at(step)
        return dataclasses.replace(batch, weights=np.zeros_like(batch.weights)) if step == 1 else batch

    loop.train(trainer, batch_at, held_out_of(recipe), tmp_path, seen.append)
    assert [each.loss > 0 for each in seen] == [True, False, True]
    state, _ = trainer.step(trainer.initial(), batches.batch_at(0))
    before = jax.tree.map(np.array, state)
    state, measures = trainer.step(state, batch_at(1))
    assert_same_bits((state.params, state.optimizer), (before.params, before.optimizer))
    assert int(state.step) == 2
    assert float(measures[3]) == 0


@pytest.mark.slow
def test_a_step_in_parts_equals_the_whole_step():
    whole = dataclasses.replace(SMOKE, batch=8)
    parts = dataclasses.replace(whole, accumulate=4)
    results = []
    for recipe in (whole, parts):
        trainer = Trainer(pretrain_job(recipe), recipe, one_device())
        state = trainer.initial()
        batch = PackedBatches(*_batches_of(recipe)).batch_at(0)
        # Parts of very different weight: a mean of their means would be another loss.
        batch = dataclasses.replace(batch, weights=batch.weights * np.arange(8, dtype=np.float32)[:, None])
        state, measures = trainer.step(state, batch)
        results.append((state.params, measures, trainer.evaluate(state.params, held_out_of(recipe)())[0]))
    for one, other in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_remat_changes_no_gradient_and_bfloat16_little():
    losses = {}
    for name, change in {"plain": {}, "remat": {"remat": "full"}, "bf16": {"precision": "bfloat16"}}.items():
        recipe = dataclasses.replace(SMOKE, **change)
        trainer = Trainer(pretrain_job(recipe), recipe, one_device())
        _, measures = trainer.step(trainer.initial(), PackedBatches(*_batches_of(recipe)).batch_at(0))
        losses[name] = [float(each) for each in measures]
    np.testing.assert_allclose(losses["remat"], losses["plain"], rtol=1e-5)
    np.testing.assert_allclose(losses["bf16"], losses["plain"], rtol=2e-2)
    assert losses["bf16"] != losses["plain"]


def test_weight_decay_is_on_matrices_only():
    params = initial_state(SMOKE).params
    decayed = decays({**params, "layers.0.attn.q_bias": None, "final_norm.bias": None})
    assert decayed["layers.0.attn.q"]
    assert decayed["embed.tokens"]
    for name in ("final_norm.scale", "layers.0.ffn_norm.scale", "layers.0.attn.q_bias", "final_norm.bias"):
        assert not decayed[name]
    # With no gradient, one step at a rate of 1 shrinks exactly the decayed ones.
    recipe = dataclasses.replace(SMOKE, peak_learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    optimizer = make_optimizer(recipe)

    @jax.jit
    def updates_without_gradient(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(zeros, optimizer.init(params), params)[0]

    updates = updates_without_gradient(params)
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.05 * params[name] if decayed[name] else 0 * update)


@pytest.mark.slow
def test_muon_moves_matrices_by_their_directions_and_leaves_the_rest_to_adamw():
    cfg = dataclasses.replace(SMOKE.model, qkv_bias=True)
    moe = dataclasses.replace(cfg, experts=2, experts_per_token=1, qkv_bias=False)
    for model in (cfg, moe):
        recipe = dataclasses.replace(SMOKE, model=model, optimizer="muon", weight_decay=0.0, warmup_steps=0)
        params = initial_state(recipe).params
        seen = {name for name, sides in matrices(params).items() if sides is not None}
        assert seen == {
            name for name in params if name.endswith((".q", ".k", ".v", ".o", ".gate", ".up", ".down"))
        }
        optimizer = make_optimizer(recipe)
        gradients = {
            name: jax.random.normal(jax.random.key(number), value.shape) * 1e-3
            for number, (name, value) in enumerate(sorted(params.items()))
        }

        @jax.jit
        def first_updates(gradients, params, optimizer=optimizer):
            with jax.numpy_dtype_promotion("standard"):
                return optimizer.update(gradients, optimizer.init(params), params)[0]

        updates = first_updates(gradients, params)
        for name in seen:
            stack = updates[name] if ".experts." in name else updates[name][None]
            for update in stack:
                # All singular values are about the same: no direction is favoured.
                values = np.linalg.svd(update.reshape(-1, update.shape[-1]), compute_uv=False)
                assert values[0] < 2.5 * values[min(update.size // update.shape[-1], update.shape[-1]) - 1]
        # Adam's first step has one size everywhere.
        embedding = np.abs(updates["embed.tokens"])
        assert np.quantile(embedding, 0.99) < 1.01 * np.quantile(embedding, 0.01)


@pytest.mark.slow
def test_experts_learn_and_their_load_is_reported_apart(tmp_path):
    model = dataclasses.replace(SMOKE.model, model_type="mixtral", experts=4, experts_per_token=2)
    recipe = dataclasses.replace(
        SMOKE, model=model, steps=40, checkpoint_steps=40, log_steps=10, optimizer="muon", balance_weight=0.1
    )
    seen = []
    train(dataclasses.replace(recipe, peak_learning_rate=1e-2), tmp_path, seen.append)
    assert seen[-1].loss < 0.6 * seen[0].loss
    # A balanced layer costs the weight times the experts per token, and no layer less.
    assert 0.2 <= seen[-1].penalty < 0.26


def test_learning_rate_warms_up_then_falls_on_a_cosine():
    recipe = dataclasses.replace(
        SMOKE, steps=110, warmup_steps=10, peak_learning_rate=1.0 - 1e-9, final_learning_rate_share=0.2
    )
    rates = [float(learning_rate(recipe)(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(rates, [1 / 11, 1 / 11 + 5 / 11, 1.0, 0.6, 0.2], rtol=1e-5)


def test_held_out_loss_does_not_depend_on_how_it_is_batched():
    losses = []
    for change in ({}, {"batch": 1}, {"batch": 3}, {"batch": 6, "accumulate": 2}):
        recipe = dataclasses.replace(SMOKE, **change)
        trainer = Trainer(pretrain_job(recipe), recipe, one_device())
        losses.append(trainer.evaluate(trainer.initial().params, held_out_of(recipe)())[0])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    # An untrained model knows nothing: the loss is near that of a uniform guess.
    assert losses[0] == pytest.approx(np.log(SMOKE.model.vocab_size), rel=0.02)


def test_held_out_loss_is_told_by_source():
    recipe = dataclasses.replace(SMOKE, batch=1)
    trainer = Trainer(pretrain_job(recipe), recipe, one_device())
    batches = list(held_out_of(recipe)())
    marked = [
        dataclasses.replace(batch, sources=np.full_like(batch.sources, 2 * n))
        for n, batch in enumerate(batches)
    ]
    whole, by_source = trainer.evaluate(trainer.initial().params, marked)
    assert list(by_source) == [2 * n for n in range(len(batches))]
    weights = [batch.weights.sum() for batch in batches]
    assert whole == pytest.approx(np.average(list(by_source.values()), weights=weights), rel=1e-6)


def test_a_diverged_run_stops(tmp_path):
    with pytest.raises(JaxllmError, match="loss is nan at step 1"):
        train(SMOKE, tmp_path, job=poisoned(pretrain_job(SMOKE)))


def test_one_graph_is_compiled_for_all_steps():
    traced = []
    job = pretrain_job(SMOKE)

    def losses(params, frozen, batch):
        traced.append(batch.tokens.shape)
        return job.losses(params, frozen, batch)

    trainer = Trainer(dataclasses.replace(job, losses=losses), SMOKE, one_device())
    state, batches = trainer.initial(), PackedBatches(*_batches_of(SMOKE))
    for step in range(4):
        state, _ = trainer.step(state, batches.batch_at(step))
    assert traced == [(SMOKE.batch, SMOKE.row_tokens)]


def _batches_of(recipe):
    return DOCUMENTS, (), recipe.row_tokens, recipe.batch, recipe.seed


@pytest.mark.parametrize(
    ("compiles", "figure"), [(True, r"needs \d+\.\d GiB per device and"), (False, "a step")]
)
def test_too_little_memory_is_told_with_what_to_change(compiles, figure, monkeypatch):
    trainer = Trainer(pretrain_job(SMOKE), SMOKE, one_device())
    batch = PackedBatches(DOCUMENTS, (), SMOKE.row_tokens, SMOKE.batch, SMOKE.seed).batch_at(0)
    state, _ = trainer.step(trainer.initial(), batch)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while allocating 9 bytes.")

    (shapes,), (compiled,) = trainer._compiled.keys(), trainer._compiled.values()

    class Full:
        __call__ = full
        memory_analysis = staticmethod(compiled.memory_analysis)

    if compiles:
        trainer._compiled[shapes] = Full()  # pyright: ignore[reportArgumentType]
    else:
        trainer._compiled.clear()
        monkeypatch.setattr(trainer, "_step", SimpleNamespace(lower=full))
    with pytest.raises(
        ConfigError,
        match=f"{figure} does not fit cpu: take a larger `accumulate` in the recipe, now 1; `remat",
    ):
        trainer.step(state, batch)


def test_a_kernel_that_does_not_fit_is_no_lack_of_memory():
    shared = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262656, available: 232448"
    message = "a kernel does not fit cpu.*requested 262656.*JAXLLM_KERNELS=xla"
    with pytest.raises(ConfigError, match=message) as found, memory_told(lambda: None, SMOKE):
        raise jax.errors.JaxRuntimeError(shared)
    assert "accumulate" not in str(found.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="quota"), memory_told(lambda: None, SMOKE):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: quota of requests used up")


def test_advice_leaves_out_what_the_settings_say_already():
    done = dataclasses.replace(SMOKE, remat="full", accumulate=SMOKE.batch)
    assert what_to_change(0, 1, done) == (
        f"shorter `row_tokens`, now {SMOKE.row_tokens}; or more devices along fsdp (--mesh)"
    )


def test_precision_is_by_the_device_where_none_is_said(monkeypatch):
    assert (SMOKE.precision, SMOKE.computed_in, SMOKE.frozen_in) == (None, "float32", "f32")
    assert SMOKE.on_accelerator().computed_in == "bfloat16"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (SMOKE.computed_in, SMOKE.frozen_in) == ("bfloat16", "bf16")
    said = dataclasses.replace(SMOKE, precision="float32")
    assert (said.computed_in, said.on_accelerator().computed_in) == ("float32", "float32")
