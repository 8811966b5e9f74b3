"""The loop and its optimizers: learning, exact resumption, accumulation, precision, and what it refuses."""

import dataclasses
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest

from jaxllm.errors import CheckpointError, ConfigError, JaxllmError
from jaxllm.models.parameters import init_params
from jaxllm.training.data.rows import Batch
from jaxllm.training.decoders import pretrain_job
from jaxllm.training.loop import losses
from jaxllm.training.loop import trainer as loop
from jaxllm.training.loop.checkpoints import Checkpoints
from jaxllm.training.loop.hardware import explain_memory_errors, peak_memory_bytes
from jaxllm.training.loop.losses import distillation_losses, next_token_losses, outputs_of, vocabulary_blocks
from jaxllm.training.loop.optimizer import decays, learning_rate, make_optimizer, scale_by_muon
from jaxllm.training.loop.run_files import StepTrace
from jaxllm.training.loop.trainer import Preempted, Trainer
from tests.training.loop.test_parallel import MATRICES, SHAPES, gradients
from tests.training.tiny_runs import (
    SMOKE,
    assert_same_bits,
    batches_of,
    held_out_of,
    one_device,
    train,
    trainer_of,
)  # fmt: skip

LONG = dataclasses.replace(SMOKE, steps=42, checkpoint_steps=7, log_steps=1, peak_learning_rate=1e-2)
# A step of four parts, and the same as a whole.
PARTS, FULL_LEVEL = (dataclasses.replace(SMOKE, batch=8, accumulate=parts) for parts in (4, 1))
ROW = dataclasses.replace(SMOKE, batch=1)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """The folder of a run that learns, its records, and its last state on the host."""
    folder, seen = tmp_path_factory.mktemp("long"), []
    trainer = Trainer(pretrain_job(LONG), LONG, one_device())
    state = train(LONG, folder, seen.append, trainer=trainer)
    return folder, seen, jax.tree.map(np.array, state)


def test_loss_falls_and_the_best_checkpoint_is_kept(long_run):
    folder, seen, _ = long_run
    assert [each.step for each in seen] == list(range(1, 43))
    assert seen[-1].loss < 0.5 * seen[0].loss
    held_out = {each.step: each.held_out_loss for each in seen if each.held_out_loss is not None}
    assert list(held_out) == list(range(7, 43, 7))
    assert seen[-1].held_out_by_source == {0: pytest.approx(held_out[42])}
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.latest() == 42
        assert checkpoints.best() == min(held_out.items(), key=lambda item: item[1])
    # Compiling is in the first record alone.
    assert seen[0].compile_s > 0 == max(each.compile_s for each in seen[1:])
    assert 0 < seen[0].peak_memory_bytes <= peak_memory_bytes()


KILLED_RUN = """
import sys
from pathlib import Path
from tests.training.tiny_runs import train
from tests.training.loop.test_trainer import LONG
train(LONG, Path(sys.argv[1]), lambda progress: print(progress.step, flush=True))
"""


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(tmp_path, long_run):
    command = [sys.executable, "-c", KILLED_RUN, str(tmp_path)]
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
    assert last < LONG.steps
    steps = []
    assert_same_bits(train(LONG, tmp_path, lambda progress: steps.append(progress.step)), long_run[2])
    # At most the steps since a checkpoint are done again, and then nothing is left to do.
    assert steps[0] <= last + 1
    assert steps == list(range(steps[0], LONG.steps + 1))
    assert_same_bits(train(LONG, tmp_path, pytest.fail), long_run[2])


@pytest.mark.parametrize("recipe", [SMOKE, PARTS], ids=["whole", "parts"])
def test_a_step_without_weight_is_no_step(tmp_path, recipe):
    recipe = dataclasses.replace(recipe, checkpoint_steps=6, log_steps=1)
    batches, trainer, seen = batches_of(recipe), trainer_of(recipe), []

    def batch_at(step):
        batch = batches.batch_at(step)
        return dataclasses.replace(batch, weights=np.zeros_like(batch.weights)) if step == 1 else batch

    loop.train(trainer, batch_at, held_out_of(recipe), tmp_path, seen.append)
    assert [each.loss > 0 for each in seen] == [True, False, True, True, True, True]
    state, _ = trainer.step(trainer.initial(), batches.batch_at(0))
    before = jax.tree.map(np.array, state)
    state, measures = trainer.step(state, batch_at(1))
    assert_same_bits((state.params, state.optimizer), (before.params, before.optimizer))
    assert int(state.step) == 2
    assert float(measures[3]) == 0


@pytest.mark.slow
def test_a_step_in_parts_equals_the_whole_step():
    results = []
    for recipe in (FULL_LEVEL, PARTS):
        trainer = trainer_of(recipe)
        batch = batches_of(recipe).batch_at(0)
        # Parts of very different weight: a mean of their means would be another loss.
        batch = dataclasses.replace(batch, weights=batch.weights * np.arange(8, dtype=np.float32)[:, None])
        state, measures = trainer.step(trainer.initial(), batch)
        results.append((state.params, measures, trainer.evaluate(state.params, held_out_of(recipe)())[0]))
    for one, other in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_remat_changes_no_gradient_and_bfloat16_little():
    losses = {}
    for name, change in {"plain": {}, "remat": {"remat": "full"}, "bf16": {"precision": "bfloat16"}}.items():
        trainer = trainer_of(dataclasses.replace(SMOKE, **change))
        _, measures = trainer.step(trainer.initial(), batches_of(SMOKE).batch_at(0))
        losses[name] = [float(each) for each in measures]
    np.testing.assert_allclose(losses["remat"], losses["plain"], rtol=1e-5)
    np.testing.assert_allclose(losses["bf16"], losses["plain"], rtol=2e-2)
    assert losses["bf16"] != losses["plain"]


def updates_of(recipe, gradients, params):
    """An optimizer's first updates."""
    optimizer = make_optimizer(recipe)

    @jax.jit
    def updates(gradients, params):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(gradients, optimizer.init(params), params)[0]

    return updates(gradients, params)


def test_weight_decay_is_on_matrices_only():
    params = trainer_of(SMOKE).initial().params
    decayed = decays({**params, "layers.0.attn.q_bias": None, "final_norm.bias": None})
    assert decayed["layers.0.attn.q"]
    assert decayed["embed.tokens"]
    for name in ("final_norm.scale", "layers.0.ffn_norm.scale", "layers.0.attn.q_bias", "final_norm.bias"):
        assert not decayed[name]
    # With no gradient, one step at a rate of 1 shrinks exactly the decayed ones.
    recipe = dataclasses.replace(SMOKE, peak_learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    updates = updates_of(recipe, jax.tree.map(np.zeros_like, params), params)
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.05 * params[name] if decayed[name] else 0 * update)


@pytest.mark.slow
def test_experts_learn_and_their_load_is_reported_apart(tmp_path):
    model = dataclasses.replace(SMOKE.model, model_type="mixtral", experts=4, experts_per_token=2)
    recipe = dataclasses.replace(
        SMOKE, model=model, steps=40, checkpoint_steps=40, log_steps=10, optimizer="muon", balance_weight=0.1,
        peak_learning_rate=1e-2,
    )  # fmt: skip
    seen = []
    train(recipe, tmp_path, seen.append)
    assert seen[-1].loss < 0.6 * seen[0].loss
    # A balanced layer costs the weight times the experts per token, and no layer less.
    assert 0.2 <= seen[-1].penalty < 0.26


def test_learning_rate_warms_up_then_falls_on_a_cosine():
    recipe = dataclasses.replace(
        SMOKE, steps=110, warmup_steps=10, peak_learning_rate=1.0 - 1e-9, final_learning_rate_share=0.2
    )
    rates = [float(learning_rate(recipe)(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(rates, [1 / 11, 1 / 11 + 5 / 11, 1.0, 0.6, 0.2], rtol=1e-5)


def test_held_out_losses_are_of_few_batches_and_told_by_source(tmp_path):
    losses = []
    for most in (1, 0):
        recipe = dataclasses.replace(ROW, steps=1, evaluation_batches=most)
        state = train(recipe, tmp_path / str(most), lambda progress: losses.append(progress.held_out_loss))
    trainer, batches = trainer_of(ROW), list(held_out_of(ROW)())
    marked = [
        dataclasses.replace(batch, sources=np.full_like(batch.sources, 2 * n))
        for n, batch in enumerate(batches)
    ]
    whole, by_source = trainer.evaluate(state.params, marked)
    assert list(by_source) == [2 * n for n in range(len(batches))]
    assert losses == [pytest.approx(by_source[len(batches) // 2 * 2]), pytest.approx(whole)]
    weights = [batch.weights.sum() for batch in batches]
    assert whole == pytest.approx(np.average(list(by_source.values()), weights=weights), rel=1e-6)


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
    assert run(3, None) == [0, 1, 2]
    with pytest.raises(ConfigError, match="and 2 are left: train more"):
        run(2)


def test_a_checkpoint_in_writing_does_not_see_the_next_steps(tmp_path):
    trainer = trainer_of(SMOKE)
    state = trainer.initial()
    before = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1.0)
        for step in range(3):
            state, _ = trainer.step(state, batches_of(SMOKE).batch_at(step))
    with Checkpoints(tmp_path) as checkpoints:
        assert_same_bits(checkpoints.restore(0, trainer.abstract()), before)


def test_a_diverged_run_stops(tmp_path):
    trainer = trainer_of(SMOKE)
    start = trainer.initial()
    start.params["final_norm.scale"] *= jnp.float32(jnp.nan)
    trainer.initial = lambda: start
    with pytest.raises(JaxllmError, match="loss is nan at step 1"):
        train(SMOKE, tmp_path, trainer=trainer)


def test_one_graph_is_compiled_for_all_steps_of_a_shape():
    traced, compiled = [], []
    job = pretrain_job(SMOKE)

    def losses(params, frozen, batch):
        traced.append(batch.tokens.shape)
        return job.losses(params, frozen, batch)

    trainer = Trainer(dataclasses.replace(job, losses=losses), SMOKE, one_device())
    state = trainer.initial()
    for step, batch in enumerate((4, 4, 8, 4)):
        state, _ = trainer.step(state, batches_of(dataclasses.replace(SMOKE, batch=batch)).batch_at(step))
        compiled.append(trainer.compile_s)
    assert traced == [(4, SMOKE.row_tokens), (8, SMOKE.row_tokens)]
    assert compiled[0] == compiled[1] < compiled[2] == compiled[3]


@pytest.mark.parametrize(
    ("compiles", "figure"), [(True, r"needs \d+\.\d GiB per device and"), (False, "a step")]
)
def test_too_little_memory_is_explained_with_what_to_change(compiles, figure):
    trainer, batch = trainer_of(SMOKE), batches_of(SMOKE).batch_at(0)
    state, _ = trainer.step(trainer.initial(), batch)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while allocating 9 bytes.")

    class Full:
        __call__ = full
        memory_analysis = staticmethod(next(iter(trainer._compiled.values())).memory_analysis)

    # Of its own: others share what is compiled.
    trainer._compiled = dict.fromkeys(trainer._compiled, Full()) if compiles else {}
    trainer._step = SimpleNamespace(lower=full)
    message = f"{figure} does not fit cpu: take a larger `accumulate` in the recipe, now 1; `remat"
    with pytest.raises(ConfigError, match=message):
        trainer.step(state, batch)
    kernel = pytest.raises(ConfigError, match=r"a kernel does not fit cpu.*JAXLLM_KERNELS=xla")
    with kernel, explain_memory_errors(lambda: None, SMOKE):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")


def test_updates_are_those_of_optax():
    ours = scale_by_muon(lambda name, rank: MATRICES[name])
    dims = {name: optax.contrib.MuonDimensionNumbers(m.rows, m.columns) for name, m in MATRICES.items()}
    # optax turns an update around.
    theirs = optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims)
    found: dict[int, Any] = {}
    with jax.numpy_dtype_promotion("standard"):
        for number, each in enumerate((ours, theirs)):
            update, state = jax.jit(each.update), each.init(gradients(0))
            for step in range(60):
                found[number], state = update(gradients(step), state, gradients(0))
    for name in SHAPES:
        # optax corrects the bias of its first steps' momentum, which only there turns an update.
        np.testing.assert_allclose(found[0][name], found[1][name], atol=0.02)


# SIGTERM and Ctrl-C save a checkpoint, from which the same command ends with the same bits.
STOPPED = dataclasses.replace(SMOKE, steps=6, checkpoint_steps=4, log_steps=1)


@pytest.fixture(autouse=True)
def interrupts():
    """As in a terminal: a suite that runs in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The last state of a run that nobody stopped."""
    return train(STOPPED, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(tmp_path, capfd, whole, number, name):
    before = signal.getsignal(number)

    def stop(progress):
        if progress.step == 1:
            os.kill(os.getpid(), number)

    with pytest.raises(Preempted, match=f"by {name} after step 2 of 6, which is saved; the same command"):
        train(STOPPED, tmp_path, stop)
    assert signal.getsignal(number) == before
    assert ("Ctrl-C again ends at once" in capfd.readouterr().err) == (number == signal.SIGINT)
    # A checkpoint without a held-out loss is never the best.
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.best()
    seen = []
    assert_same_bits(train(STOPPED, tmp_path, seen.append), whole)
    assert [each.step for each in seen] == [3, 4, 5, 6]


def test_a_second_interrupt_ends_at_once_and_an_ignored_one_stays_ignored(tmp_path):
    steps = []

    def interrupt(progress):
        steps.append(progress.step)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(STOPPED, tmp_path / "twice", interrupt)
    assert steps == [1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert int(train(STOPPED, tmp_path / "ignored", interrupt).step) == STOPPED.steps


# Losses over blocks of the vocabulary are those of whole logits, with their gradients.
CFG = dataclasses.replace(SMOKE.model, vocab_size=203)


def some_rows():
    ids = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 17)).astype(np.int32)
    nothing = np.zeros((2, 16), np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], nothing, np.ones((2, 16), np.float32), nothing)


def in_blocks(monkeypatch, least):
    monkeypatch.setattr(losses, "WHOLE_LOGITS_BYTES", 0)
    monkeypatch.setattr(losses, "_BLOCK_TOKENS", 64)
    monkeypatch.setattr(losses, "_LEAST_BLOCK_TOKENS", least)


@pytest.mark.parametrize(("least", "softcap"), [(8, 3.0), (60, 0.0)])
def test_blocks_have_the_losses_of_whole_logits(monkeypatch, least, softcap):
    cfg = dataclasses.replace(CFG, logit_softcap=softcap)
    params, other = (init_params(cfg, jax.random.key(seed)) for seed in (0, 1))

    def hard(params):
        return next_token_losses(outputs_of(params, some_rows(), cfg=cfg), some_rows())

    def soft(params):
        outputs, teacher = (outputs_of(each, some_rows(), cfg=cfg) for each in (params, other))
        return distillation_losses(outputs, teacher, some_rows(), teacher_share=0.7)

    def measured():
        def of(params):
            return [
                (each(params), jax.grad(lambda own, each=each: each(own).mean())(params))
                for each in (hard, soft)
            ]

        return jax.jit(of)(params)

    whole = measured()
    in_blocks(monkeypatch, least)
    for one, other_way in zip(jax.tree.leaves(whole), jax.tree.leaves(measured()), strict=True):
        np.testing.assert_allclose(one, other_way, atol=2e-5)


def test_no_array_has_all_logits(monkeypatch):
    in_blocks(monkeypatch, 8)
    params = init_params(CFG, jax.random.key(0))

    def loss(params, dtype):
        return next_token_losses(outputs_of(params, some_rows(), cfg=CFG, dtype=dtype), some_rows()).mean()

    for dtype in (jnp.float32, jnp.bfloat16):
        text = jax.jit(jax.grad(loss), static_argnums=1).lower(params, dtype).as_text()
        assert "2x16x203" not in text
        assert "32x203" not in text


def test_vocabularies_are_cut_evenly_where_they_can_be():
    assert [vocabulary_blocks(size) for size in (288, 8192, 32000, 128256, 151936)] == [1, 1, 4, 16, 32]
    assert vocabulary_blocks(50257) == 29
    assert vocabulary_blocks(65537) == 9
