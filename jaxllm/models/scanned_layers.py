"""A pass over all layers, in loops where they are equal, and stacks of equal layers for training.

A step of many layers has the code of one: tracing, lowering and compiling take as long for 32 layers as for
2, and an optimizer updates one array per kind of parameter. Layers are equal if their units, windows,
rotary embeddings and kinds are. The parameters of equal layers

    layers.{first}.{name}  layers.{first + period}.{name} ...   become   stacks.{first}.{name}  [n, ...]

with a leading axis of layers (see `LayerRun`); unique layers keep their names. The same holds for anything
named like a parameter, such as an adapter or an optimizer's moments.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layer_stack import (
    STACK,
    LayerRun,
    LayerStack,
    StackedLayers,
    first_alike,
    kinds_of,
    layer_runs,
    params_of_layer,
    within_layer,
)
from jaxllm.models.parameters import Params

# Saved activations of the backward pass: all; results of products with weights; each layer's input.
Remat = Literal["none", "dots", "full"]
STACKS = "stacks."
Kept = TypeVar("Kept")
Carry = TypeVar("Carry")


def scan_runs(cfg: ModelConfig) -> list[LayerRun]:
    """The runs of equal layers of a model."""
    return layer_runs(first_alike(kinds_of(cfg)))


def is_stacked(params: Mapping[str, Any]) -> bool:
    """Whether some layers are in stacks."""
    return any(name.startswith(STACKS) for name in params)


def stack_name(cfg: ModelConfig, name: str) -> tuple[str, int]:
    """The place of a parameter in stacked layers: its name there, and its row in the stack; -1 if it is not
    stacked."""
    if not name.startswith("layers."):
        return name, -1
    layer = int(name.split(".", 2)[1])
    run = next(run for run in scan_runs(cfg) if layer < run.first + run.period * run.repeats)
    if run.repeats == 1:
        return name, -1
    row, place = divmod(layer - run.first, run.period)
    return f"{STACKS}{run.first + place}.{within_layer(name)}", row


def stacked(params: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Parameters with the layers of each run in stacks (see the module docstring); also in a step.

    Raises:
      ConfigError: a layer lacks a parameter that an equal one has.
    """
    columns: dict[str, dict[int, Any]] = {}
    for name, each in params.items():
        own, row = stack_name(cfg, name)
        columns.setdefault(own, {})[row] = each
    counts = {run.first + place: run.repeats for run in scan_runs(cfg) for place in range(run.period)}
    found = {}
    for name, rows in columns.items():
        if -1 in rows:
            found[name] = rows[-1]
            continue
        count = counts[int(name.split(".", 2)[1])]
        if sorted(rows) != list(range(count)):
            raise ConfigError(f"{name} is there for {len(rows)} of {count} equal layers; they train together")
        found[name] = jax.tree.map(lambda *column: jnp.stack(column), *(rows[row] for row in range(count)))
    return found


def unstacked(params: Mapping[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """Parameters with each layer under its own names again; also in a step."""
    starts = {run.first + place: run for run in scan_runs(cfg) for place in range(run.period)}
    found = {}
    for name, each in params.items():
        if not name.startswith(STACKS):
            found[name] = each
            continue
        like = int(name.split(".", 2)[1])
        leaves, structure = jax.tree.flatten(each)
        # Not by index: the gradient of a split is one concatenation, that of each index a whole stack of
        # zeros.
        rows = (
            leaf if isinstance(leaf, np.ndarray) else [x[0] for x in jax.lax.split(leaf, [1] * len(leaf))]
            for leaf in leaves
        )
        for row, parts in enumerate(zip(*rows, strict=True)):
            layer = like + row * starts[like].period
            found[f"layers.{layer}.{within_layer(name)}"] = jax.tree.unflatten(structure, parts)
    return found


def remembering(step: Callable[..., Kept], remat: Remat, *, in_loop: bool = False) -> Callable[..., Kept]:
    """The step; its backward pass saves the arrays of `remat`, and recomputes the rest."""
    if remat == "none":
        return step
    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if remat == "dots" else policies.nothing_saveable
    # In a loop nothing can be merged across the barrier that would otherwise protect the recomputation.
    return jax.checkpoint(step, policy=policy, prevent_cse=not in_loop)


def over_layers(
    params: Params,
    cfg: ModelConfig,
    body: Callable[[Carry, Params, int, Any], Carry],
    carry: Carry,
    *,
    remat: Remat = "none",
) -> Carry:
    """Runs `body` for each layer, in order.

    Args:
      params: parameters of the model, its layers separate, in stacks, or all of them under `STACK`.
      body: function of (its result for the layer before, parameters for `layer_of`, a layer that equals
        this one, its number), where only the number may be unknown at trace time; None in stacks for
        training.
      carry: initial value for the first layer.
      remat: residuals of each layer for the backward pass.
    """
    stack: Any = params.get(STACK)
    if remat != "none" or not isinstance(stack, LayerStack | StackedLayers):
        return scan_layers(params, cfg, lambda *of: (body(*of), None), carry, remat)[0]
    for run in layer_runs(stack.alike):

        def pattern(index: jax.Array | int, carry: Carry, run: LayerRun = run) -> Carry:
            for like in range(run.first, run.first + run.period):
                number = like + index * run.period
                own: Any = {STACK: stack.at(like, jnp.asarray(number, jnp.int32))}
                carry = body(carry, own, like, number)
            return carry

        carry = pattern(0, carry) if run.repeats == 1 else jax.lax.fori_loop(0, run.repeats, pattern, carry)
    return carry


def scan_layers(
    params: Params,
    cfg: ModelConfig,
    body: Callable[[Carry, Params, int, Any], tuple[Carry, Any]],
    carry: Carry,
    remat: Remat = "none",
) -> tuple[Carry, list[Any]]:
    """`over_layers` of a `body` that also returns a layer's output, or None.

    Returns:
      The last layer's carry, and the outputs of layers that have one, each stacked over layers in order.
    """
    outputs: list[Any] = []

    def run_one(carry: Carry, own: Params, like: int, *, in_loop: bool) -> tuple[Carry, Any]:
        def step(carry: Carry, own: Params) -> tuple[Carry, Any]:
            return body(carry, own, like, None if in_loop else like)

        # `jax.checkpoint` saves every argument, so a layer only gets its own parameters.
        return remembering(step, remat, in_loop=in_loop)(carry, own)

    def pattern(carry: Carry, stacks: Mapping[int, Params]) -> tuple[Carry, list[Any]]:
        found = []
        for like, own in stacks.items():
            carry, output = run_one(carry, own, like, in_loop=True)
            found += [] if output is None else [output]
        return carry, found

    single = [LayerRun(layer, 1, 1) for layer in range(cfg.layers)]
    for run in scan_runs(cfg) if is_stacked(params) else single:
        if run.repeats == 1:
            carry, output = run_one(carry, params_of_layer(params, run.first), run.first, in_loop=False)
            outputs += [] if output is None else [jax.tree.map(lambda part: part[None], output)]
            continue
        # Under the names of the first layer of each stack.
        stacks = {
            like: {
                f"layers.{like}.{within_layer(name)}": each
                for name, each in params.items()
                if name.startswith(f"{STACKS}{like}.")
            }
            for like in range(run.first, run.first + run.period)
        }
        carry, found = jax.lax.scan(pattern, carry, stacks)
        if found:
            # `[n, ...]` of each place of a pattern as `[n · places, ...]`, layer after layer.
            outputs.append(
                jax.tree.map(lambda *rows: jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:]), *found)
            )
    return carry, outputs
