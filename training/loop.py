"""The training loop: one compiled step, held-out loss, and checkpoints that resume bit for bit.

The state of a run is (step, parameters, optimizer state); batches follow from the step alone. So a
run that was killed goes on from its last checkpoint and ends with the same bits as one that never
stopped, on the same machine and number of devices.

The batch is divided over all devices, each with a copy of the parameters. On a CPU, two devices on two
cores train 1.5x faster than one device with two threads, because XLA:CPU leaves part of the backward
pass on one thread. The loop prints nothing: it hands `Progress` records to its caller.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, JaxllmError
from jaxllm.models import decoder
from training.data import evaluation_batches
from training.recipe import Recipe

Params = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds.

    Attributes:
      step: int32 scalar, steps done.
      params: float32 leaves, see `jaxllm.models.decoder`.
      optimizer: optax's state.
    """

    step: jax.Array
    params: Params
    optimizer: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Metrics after `step` steps; losses in nats per token.

    `loss` is the mean over the steps since the last record, `gradient_norm` the last step's before
    clipping; `held_out_loss` is set where a checkpoint was written.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_s: float
    held_out_loss: float | None = None


def decays(params: Mapping[str, Any]) -> dict[str, bool]:
    """True for the parameters that weight decay pulls to zero: the matrices, not norms or biases."""
    return {name: not name.endswith((".scale", "bias")) for name in params}


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to the final share at the last step."""
    peak = recipe.peak_learning_rate
    # From one step's worth, not from zero: the first step should learn too.
    warmup = optax.schedules.linear_schedule(peak / (recipe.warmup_steps + 1), peak, recipe.warmup_steps)
    cosine = optax.schedules.cosine_decay_schedule(
        peak, max(recipe.steps - recipe.warmup_steps, 1), recipe.final_learning_rate_share
    )
    return optax.schedules.join_schedules([warmup, cosine], [recipe.warmup_steps])


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) behind clipping by the global norm."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip_norm),
        optax.adamw(
            learning_rate(recipe),
            b1=recipe.beta1,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            mask=decays,
        ),
    )


def next_token_losses(params: Params, tokens: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of each next token of `tokens` `[B, T+1]` int32."""
    hidden, _ = decoder.forward(params, tokens[:, :-1], cfg=cfg)
    scores = decoder.logits(params, hidden, cfg=cfg)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])


@functools.partial(jax.jit, static_argnames="recipe", donate_argnames="state")
def train_step(
    state: TrainState, tokens: jax.Array, *, recipe: Recipe
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One optimizer step on `tokens` `[B, T+1]` int32, compiled once per recipe; donates `state`.

    Returns:
      The next state, the mean loss in nats per token and the gradient's norm before clipping.
    """

    def mean_loss(params: Params) -> jax.Array:
        return jnp.mean(next_token_losses(params, tokens, cfg=recipe.model))

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    # optax counts steps in int32 and raises floats to that power, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        optimizer = make_optimizer(recipe)
        updates, inner = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    state = TrainState(step=state.step + 1, params=params, optimizer=inner)
    return state, loss, optax.tree.norm(gradients)


def evaluate(params: Params, tokens: np.ndarray, *, recipe: Recipe) -> float:
    """Nats per token of `tokens` `[tokens]`, each (but the first) a target once."""
    rows = NamedSharding(data_mesh(recipe.batch), PartitionSpec("data"))
    nats, count = 0.0, 0.0
    for batch, weights in evaluation_batches(tokens, recipe.window_tokens, recipe.batch):
        placed = jax.device_put((batch, weights), rows)
        nats += float(_weighted_loss(params, *placed, cfg=recipe.model))
        count += float(weights.sum())
    return nats / max(count, 1.0)


@functools.partial(jax.jit, static_argnames="cfg")
def _weighted_loss(params: Params, tokens: jax.Array, weights: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    return jnp.sum(next_token_losses(params, tokens, cfg=cfg) * weights)


def data_mesh(batch: int) -> Mesh:
    """A mesh over as many devices as divide the batch, at most all of them."""
    devices = jax.devices()
    count = max(n for n in range(1, len(devices) + 1) if batch % n == 0)
    return Mesh(np.asarray(devices[:count]), ("data",), axis_types=(AxisType.Auto,))


class Checkpoints:
    """Orbax checkpoints of a run: the last two, to resume, and the best by held-out loss.

    A checkpoint takes its name only when it is whole. Opening a run that another process is writing
    changes nothing in it.
    """

    def __init__(self, folder: Path) -> None:
        keep = [
            checkpoint_managers.LatestN(2),
            checkpoint_managers.BestN(get_metric_fn=_held_out_loss, reverse=True, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            # orbax stores metrics only where it is told how to rank them.
            best_fn=_held_out_loss,
            best_mode="min",
            # The next step reuses the donated buffers, which on a CPU are what would be written.
            enable_async_checkpointing=False,
        )
        self._folder = Path(folder)
        self._manager = ocp.CheckpointManager(
            self._folder.resolve(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """Steps done in the newest checkpoint."""
        return self._manager.latest_step()

    def best(self) -> tuple[int, float]:
        """The checkpoint with the lowest held-out loss: its step and that loss.

        Raises:
          CheckpointError: there is none yet.
        """
        losses = {step: _held_out_loss(self._manager.metrics(step)) for step in self._manager.all_steps()}
        if not losses:
            raise CheckpointError(f"there is no checkpoint in {self._folder} yet; train first")
        step = min(losses, key=losses.__getitem__)
        return step, losses[step]

    def save(self, state: TrainState, held_out_loss: float) -> None:
        """Writes `state` under its step and drops what is no longer needed."""
        self._manager.save(
            int(state.step),
            args=ocp.args.StandardSave(state),
            metrics={"held_out_loss": held_out_loss},
        )

    def restore(self, step: int, recipe: Recipe, mesh: Mesh) -> TrainState:
        """The state after `step` steps, a copy on each device of `mesh`.

        Raises:
          CheckpointError: the checkpoint is damaged, or of another model.
        """
        everywhere = NamedSharding(mesh, PartitionSpec())
        shapes = jax.eval_shape(lambda: initial_state(recipe))
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes
        )
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read the checkpoint {self._folder / str(step)}: {error}; remove it to go on "
                "from an earlier one"
            ) from error


def initial_state(recipe: Recipe) -> TrainState:
    """Random parameters from the recipe's seed, and an optimizer that has seen nothing."""
    params = decoder.init_params(recipe.model, jax.random.key(recipe.seed))
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, optimizer=make_optimizer(recipe).init(params)
    )


def train(
    recipe: Recipe,
    batch_at: Callable[[int], np.ndarray],
    held_out_tokens: np.ndarray,
    folder: Path,
    report: Callable[[Progress], None],
) -> TrainState:
    """Trains to the recipe's last step, from the newest checkpoint in `folder` if there is one.

    Args:
      recipe: the run.
      batch_at: the batch `[B, T+1]` int32 of a step (from 0), a pure function of the step.
      held_out_tokens: `[tokens]` ids.
      folder: of the checkpoints.
      report: called every `log_steps` steps and at each checkpoint; what it raises ends the run.

    Returns:
      The state after the last step; that of the newest checkpoint if it is at that step or beyond.

    Raises:
      JaxllmError: the loss is no longer finite.
      CheckpointError: the newest checkpoint cannot be read.
    """
    mesh = data_mesh(recipe.batch)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    schedule = learning_rate(recipe)
    with Checkpoints(folder) as checkpoints:
        done = checkpoints.latest()
        if done is None:
            state = jax.device_put(initial_state(recipe), NamedSharding(mesh, PartitionSpec()))
        else:
            state = checkpoints.restore(done, recipe, mesh)
        losses: list[jax.Array] = []
        started = time.perf_counter()
        for step in range((done or 0) + 1, recipe.steps + 1):
            tokens = jax.device_put(batch_at(step - 1), rows)
            state, loss, norm = train_step(state, tokens, recipe=recipe)
            losses.append(loss)
            save = step % recipe.checkpoint_steps == 0 or step == recipe.steps
            if not save and step % recipe.log_steps:
                continue
            mean = float(np.mean([float(each) for each in losses]))
            elapsed_s = time.perf_counter() - started
            if not np.isfinite(mean):
                raise JaxllmError(
                    f"the loss is {mean} at step {step}: lower peak_learning_rate or clip_norm and "
                    "start again in a new run folder"
                )
            held_out_loss = evaluate(state.params, held_out_tokens, recipe=recipe) if save else None
            if held_out_loss is not None:
                checkpoints.save(state, held_out_loss)
            report(
                Progress(
                    step=step,
                    loss=mean,
                    gradient_norm=float(norm),
                    learning_rate=float(schedule(step - 1)),
                    tokens_per_s=len(losses) * recipe.batch * recipe.window_tokens / elapsed_s,
                    held_out_loss=held_out_loss,
                )
            )
            losses, started = [], time.perf_counter()
    return state


def _held_out_loss(metrics: Any) -> float:
    return float(metrics["held_out_loss"])
