"""Trains any job: one compiled step, held-out loss, and checkpoints that resume bit for bit.

A job defines parameters and loss; settings define the optimization. The state of a run is (step,
parameters, optimizer state) and batches follow from the step only, so a killed run resumes from its last
checkpoint and ends with the same bits as one that never stopped, on the same machine and mesh.

On a CPU, two devices on two cores train faster than one device with two threads, because XLA:CPU leaves
part of the backward pass on one thread. The loop prints nothing: it passes `Progress` records to its
caller.
"""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.errors import JaxllmError
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.scanned_layers import stacked, unstacked
from jaxllm.training.data.rows import spread
from jaxllm.training.loop.checkpoints import Checkpoints, Params, TrainState
from jaxllm.training.loop.hardware import explain_memory_errors, peak_memory_bytes, utilization
from jaxllm.training.loop.optimizer import learning_rate, make_optimizer
from jaxllm.training.loop.parallel import (
    gathered,
    place_rows,
    placed,
    put,
    require_divisible,
    shardings_of,
    stacked_on,
    stacks_layers,
)
from jaxllm.training.loop.run_files import Preemption, Progress, StepTrace
from jaxllm.training.settings import TrainSettings


class Batch(Protocol):
    """Fields of a job's batch that the loop reads; a batch is a structure of arrays `[B, ...]`."""

    @property
    def weights(self) -> Any:
        """`[B, T]` float32, of each loss."""
        ...

    @property
    def sources(self) -> Any:
        """Number of the source that each loss is counted for, `[B, T]` int32."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Parameters to train, and their loss.

    Attributes:
      init: initial parameters, a dict of float32 arrays by name: from a PRNG key, or as given.
      losses: function of (parameters, frozen, batch) that returns the losses `[B, T]` float32 of all
        targets in nats, and a penalty, float32 scalar, that is added to their mean and reported separately.
      frozen: arrays that the losses need and that are not trained.
      cfg: config of the trained or adapted model, if there is one; equal layers of decoder-only models are
        stacked on accelerators (see `jaxllm.models.scanned_layers`), and passed to `losses` so.
      flops_per_token: model operations of a training step, per token; None if unknown.
      frozen_cfg: config of the model whose parameters are frozen, likewise.
      sampled_losses: training losses that are sampled anew at every step: as `losses`, with a PRNG key as
        last argument. `losses` is then only the held-out loss.
    """

    init: Callable[[jax.Array], Params] | Params
    losses: Callable[[Params, Any, Any], tuple[jax.Array, jax.Array]]
    frozen: Any = None
    sampled_losses: Callable[[Params, Any, Any, jax.Array], tuple[jax.Array, jax.Array]] | None = None
    cfg: ModelConfig | None = None
    frozen_cfg: ModelConfig | None = None
    flops_per_token: float | None = None


class Preempted(JaxllmError):
    """A run was requested to stop, and has saved a checkpoint."""


class Trainer:
    """A job's compiled functions on a mesh.

    Args:
      job: parameters and loss.
      settings: settings of the loop.
      stack: whether equal layers are stacked and run in a loop; None: see `stacks_layers`.

    Raises:
      ConfigError: the mesh does not divide the model evenly.
    """

    def __init__(self, job: Job, settings: TrainSettings, mesh: Mesh, *, stack: bool | None = None) -> None:
        self.job, self.settings, self.mesh = job, settings, mesh
        if job.cfg is not None:
            require_divisible(job.cfg, mesh)
        alone = job.cfg is not None and job.cfg.encoder is None
        self.stack = alone and (stacks_layers(mesh) if stack is None else stack)
        # An argument, not a constant of the compiled step: it may be large.
        self._given = None if callable(job.init) else job.init
        shapes = jax.eval_shape(self._initial, self._given)
        self._shardings = shardings_of(shapes, mesh)
        self._abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self._shardings,
        )
        frozen = jax.tree.map(put, job.frozen, shardings_of(job.frozen, mesh))
        if self.stack and job.frozen_cfg is not None:
            frozen = stacked_on(frozen, job.frozen_cfg, mesh)
        self._frozen = frozen
        copied = NamedSharding(mesh, PartitionSpec())
        self._step = jax.jit(
            self._one_step,
            donate_argnums=0,
            out_shardings=(self._shardings, (copied, copied, copied, copied)),
        )
        self._start = jax.jit(self._initial, out_shardings=self._shardings)
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self.compile_s = 0.0
        self._sums = jax.jit(self._source_sums, static_argnums=3, out_shardings=(copied, copied))
        self._most = jax.jit(jnp.max, out_shardings=copied)

    def initial(self) -> TrainState:
        """The job's parameters, from the settings' seed, and a fresh optimizer state."""
        # Placed first: an argument on the host would go to every device whole.
        with explain_memory_errors(lambda: None, self.settings):
            given = None if self._given is None else placed(self._given.items(), self.mesh)
            return self._start(given)

    def beside(self, init: Mapping[str, Any], frozen: Mapping[str, Any]) -> "Trainer":
        """Makes a trainer that shares this one's compiled functions.

        Args:
          init: other initial parameters, of the same shapes; for a job with given ones.
          frozen: some of the frozen arrays, of the same shapes, with unstacked layers.
        """
        other, own = copy.copy(self), {}
        for name, value in frozen.items():
            own[name] = put(value, shardings_of({name: value}, self.mesh)[name])
        if self.stack and self.job.frozen_cfg is not None:
            own = stacked_on(own, self.job.frozen_cfg, self.mesh)
        other._given, other._frozen = dict(init), {**self._frozen, **own}
        return other

    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of a state."""
        return self._abstract

    def whole(self, params: Params) -> dict[str, np.ndarray]:
        """Trained parameters in this process's memory, each layer's under its own names."""
        host = gathered(params)
        return unstacked(host, self.job.cfg) if self.stack and self.job.cfg is not None else host

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, tuple[jax.Array, ...]]:
        """One optimizer step; donates `state`.

        Returns:
          The next state; the loss in nats per token, the penalty, the gradient's norm before clipping, and
          the weight of all losses. A batch without weight changes nothing but the number of the step.

        Raises:
          ConfigError: a device has too little memory.
        """
        with jax.set_mesh(self.mesh):
            rows = place_rows(batch, self.mesh, self.settings.accumulate)
            # Batches of some jobs differ in their shapes.
            shapes = tuple(leaf.shape for leaf in jax.tree.leaves(rows))
        with (
            jax.set_mesh(self.mesh),
            explain_memory_errors(lambda: self._compiled.get(shapes), self.settings),
        ):
            if shapes not in self._compiled:
                started = time.perf_counter()
                self._compiled[shapes] = self._step.lower(state, self._frozen, rows).compile()
                self.compile_s += time.perf_counter() - started
            return self._compiled[shapes](state, self._frozen, rows)

    def lower(self, frozen: Any, batch: Any, platform: str | None = None) -> jax.stages.Lowered:
        """Lowers the step from shapes only, for this process's platform or another.

        Args:
          frozen: shapes of the job's frozen arrays, stacked if the trainer stacks.
          batch: shapes `[accumulate, B / accumulate, ...]` of a batch's arrays, with their shardings.
          platform: "cuda", "tpu" or "cpu".
        """
        platforms = None if platform is None else (platform,)
        with jax.set_mesh(self.mesh), contextlib.ExitStack() as stack:
            if platform not in (None, "cpu"):
                # Those of this process's CPU would come before the fused ones.
                stack.enter_context(without_native_kernels())
            return self._step.trace(self._abstract, frozen, batch).lower(lowering_platforms=platforms)

    def evaluate(self, params: Params, batches: Iterable[Batch]) -> tuple[float, dict[int, float]]:
        """The weighted loss in nats per token of some batches: of all sources, and of each."""
        nats: dict[int, float] = {}
        weight: dict[int, float] = {}
        for batch in batches:
            with jax.set_mesh(self.mesh):
                placed = place_rows(batch, self.mesh, self.settings.accumulate)
                # This process's own rows may have fewer sources than others'.
                count = int(self._most(placed.sources)) + 1
                # A multiple of 8: few compilations for any number of sources.
                sums, weights = self._sums(params, self._frozen, placed, -(-count // 8) * 8)
            for source, (each, own) in enumerate(zip(np.asarray(sums), np.asarray(weights), strict=True)):
                if own:
                    nats[source] = nats.get(source, 0.0) + float(each)
                    weight[source] = weight.get(source, 0.0) + float(own)
        whole = sum(nats.values()) / max(sum(weight.values()), 1e-9)
        return whole, {source: nats[source] / weight[source] for source in sorted(nats)}

    def _initial(self, given: Params | None) -> TrainState:
        init = self.job.init
        params: Any = init(jax.random.key(self.settings.seed)) if callable(init) else given
        if self.stack and self.job.cfg is not None:
            params = stacked(params, self.job.cfg)
        optimizer = make_optimizer(self.settings).init(params)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, optimizer=optimizer)

    def _one_step(
        self, state: TrainState, frozen: Any, parts: Batch
    ) -> tuple[TrainState, tuple[jax.Array, ...]]:
        weight = jnp.sum(parts.weights)
        learns = weight > 0
        total = jnp.where(learns, weight, 1)
        count = np.float32(parts.weights.shape[0])
        key = jax.random.fold_in(jax.random.key(self.settings.seed), state.step)

        def part_loss(params: Params, part: Batch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            if self.job.sampled_losses is None:
                losses, penalty = self.job.losses(params, frozen, part)
            else:
                losses, penalty = self.job.sampled_losses(params, frozen, part, key)
            mean = jnp.sum(losses * part.weights) / total
            return mean + penalty / count, (mean, penalty / count)

        def add_part(sums: Any, part: Batch) -> tuple[Any, None]:
            gradients, measured = jax.grad(part_loss, has_aux=True)(state.params, part)
            return jax.tree.map(jnp.add, sums, (gradients, measured)), None

        nothing = (jax.tree.map(jnp.zeros_like, state.params), (jnp.zeros(()), jnp.zeros(())))
        if parts.weights.shape[0] == 1:
            sums, _ = add_part(nothing, jax.tree.map(lambda each: each[0], parts))
        else:
            sums, _ = jax.lax.scan(add_part, nothing, parts)
        gradients, (loss, penalty) = sums
        # optax counts steps in int32 and raises floats to that power, which strict promotion rejects.
        with jax.numpy_dtype_promotion("standard"):
            optimizer = make_optimizer(self.settings)
            updates, inner = optimizer.update(gradients, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        # A step without a loss is none: neither a penalty nor the optimizer's moments may move anything.
        params, inner = jax.tree.map(
            lambda new, old: jnp.where(learns, new, old), (params, inner), (state.params, state.optimizer)
        )
        state = TrainState(step=state.step + 1, params=params, optimizer=inner)
        return state, (loss, penalty, optax.tree.norm(gradients), weight)

    def _source_sums(
        self, params: Params, frozen: Any, parts: Batch, sources: int
    ) -> tuple[jax.Array, jax.Array]:
        def add_part(sums: Any, part: Batch) -> tuple[Any, None]:
            losses, _ = self.job.losses(params, frozen, part)
            of = jax.nn.one_hot(part.sources, sources, dtype=jnp.float32) * part.weights[..., None]
            return (sums[0] + jnp.einsum("bt,bts->s", losses, of), sums[1] + of.sum((0, 1))), None

        sums, _ = jax.lax.scan(add_part, (jnp.zeros(sources), jnp.zeros(sources)), parts)
        return sums


def train(
    trainer: Trainer,
    batch_at: Callable[[int], Batch],
    held_out: Callable[[], Iterable[Batch]],
    folder: Path | str,
    report: Callable[[Progress], None],
    *,
    profile: Path | None = None,
) -> TrainState:
    """Trains to the last step, from the newest checkpoint in `folder` if there is one.

    Args:
      trainer: job, settings and devices.
      batch_at: batch of a step (from 0), a pure function of the step.
      held_out: batches whose loss selects the best checkpoint; at most `evaluation_batches` of them count.
      folder: folder of the checkpoints; a path or a URL.
      report: callback every `log_steps` steps and at each checkpoint; its errors end the run.
      profile: folder of a trace of a few steps, see `StepTrace`.

    Returns:
      The state after the last step; that of the newest checkpoint if it is at or beyond that step.

    Raises:
      JaxllmError: the loss is no longer finite.
      ConfigError: no step is left to trace.
      Preempted: the process received SIGTERM or Ctrl-C; a checkpoint is saved.
      CheckpointError: none of the checkpoints can be read.
    """
    settings = trainer.settings
    schedule = learning_rate(settings)
    with (
        Checkpoints(folder, resumes=True) as checkpoints,
        Preemption() as preemption,
        StepTrace(profile) as trace,
    ):
        done, state = checkpoints.newest(trainer.abstract()) or (0, trainer.initial())
        trace.expect(settings.steps - done)
        measured: list[tuple[jax.Array, ...]] = []
        started, compiled_s = time.perf_counter(), trainer.compile_s
        for step in range(done + 1, settings.steps + 1):
            with trace.step(step):
                state, measures = trainer.step(state, batch_at(step - 1))
            trace.finish(state)
            measured.append(measures)
            save = step % settings.checkpoint_steps == 0 or step == settings.steps
            stop = preemption.asked(step) and step < settings.steps
            if stop and not save:
                checkpoints.save(state, None)
            if not save and not stop and step % settings.log_steps:
                continue
            losses, penalties, norms, weights = np.asarray(measured, np.float64).T
            learnt = weights > 0
            compile_s = trainer.compile_s - compiled_s
            elapsed_s = time.perf_counter() - started - compile_s
            tokens_per_s = len(measured) * settings.batch * settings.row_tokens / elapsed_s
            mean = float(np.mean(losses[learnt])) if learnt.any() else 0.0
            if not np.isfinite(mean):
                raise JaxllmError(
                    f"the loss is {mean} at step {step}: lower peak_learning_rate or clip_norm and "
                    "start again in a new run folder"
                )
            held_out_loss, by_source = None, {}
            if save:
                some = spread(held_out(), settings.evaluation_batches)
                held_out_loss, by_source = trainer.evaluate(state.params, some)
                checkpoints.save(state, held_out_loss)
            report(
                Progress(
                    step=step,
                    loss=mean,
                    penalty=float(np.mean(penalties[learnt])) if learnt.any() else 0.0,
                    gradient_norm=float(norms[-1]),
                    learning_rate=float(np.asarray(schedule(step - 1))),
                    tokens_per_s=tokens_per_s,
                    utilization=utilization(tokens_per_s, trainer.job.flops_per_token, trainer.mesh.size),
                    peak_memory_bytes=peak_memory_bytes(),
                    compile_s=compile_s,
                    held_out_loss=held_out_loss,
                    held_out_by_source=by_source,
                )
            )
            if stop:
                raise Preempted(
                    f"stopped by {preemption.reason} after step {step} of {settings.steps}, which is saved; "
                    "the same command goes on from there"
                )
            measured, started, compiled_s = [], time.perf_counter(), trainer.compile_s
    return state
