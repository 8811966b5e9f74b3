"""Stacks the parameters of equal layers for training, and runs documents through them in one loop.

A step of many layers has the code of one: tracing, lowering and compiling take as long for 32 layers as for
2, and an optimizer updates one array per kind of parameter. Layers are equal if their units, windows,
rotary embeddings and kinds are. The parameters of equal layers

    layers.{first}.{name}  layers.{first + period}.{name} ...   become   stacks.{first}.{name}  [n, ...]

with a leading axis of layers (see `LayerRun`); unique layers keep their names. The same holds for anything
named like a parameter, such as an adapter or an optimizer's moments.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layer_stack import LayerRun, first_alike, kinds_of, layer_runs, within_layer

# Saved activations of the backward pass: all; results of products with weights; each layer's input.
Remat = Literal["none", "dots", "full"]
REMATS = ("none", "dots", "full")
STACKS = "stacks."
Kept = TypeVar("Kept")


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
        rows = zip(*(_rows(leaf) for leaf in leaves), strict=True)
        for row, parts in enumerate(rows):
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


def run_scanned(
    params: Mapping[str, Any],
    cfg: ModelConfig,
    run: Callable[..., tuple[jax.Array, Any]],
    x: jax.Array,
    remat: Remat,
) -> tuple[jax.Array, list[Any]]:
    """Runs documents through all layers.

    Args:
      params: parameters of the model, its layers in stacks.
      run: function of (a layer's parameters by name, its input `[B, T, D]`, `like=`, an equal layer) that
        returns its output, and its routing or None.
      x: `[B, T, D]`, the first layer's input.
      remat: residuals of the backward pass.

    Returns:
      The last layer's output, and the routings, each stacked over layers in order.
    """
    routings: list[Any] = []
    for each in scan_runs(cfg):
        if each.repeats == 1:
            own = _of_prefix(params, f"layers.{each.first}.")
            x, routing = remembering(functools.partial(run, like=each.first), remat)(own, x)
            routings += [] if routing is None else [jax.tree.map(lambda part: part[None], routing)]
            continue
        likes = range(each.first, each.first + each.period)
        stacks = {like: _of_prefix(params, f"{STACKS}{like}.") for like in likes}

        def pattern(x: jax.Array, rows: Mapping[int, Any]) -> tuple[jax.Array, list[Any]]:
            found = []
            for like, own in rows.items():
                named = {f"layers.{like}.{within_layer(name)}": part for name, part in own.items()}
                step = remembering(functools.partial(run, like=like), remat, in_loop=True)
                x, routing = step(named, x)
                found += [] if routing is None else [routing]
            return x, found

        x, found = jax.lax.scan(pattern, x, stacks)
        if found:
            routings.append(jax.tree.map(_in_order, *found))
    return x, routings


def _of_prefix(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name: each for name, each in params.items() if name.startswith(prefix)}


def _in_order(*rows: jax.Array) -> jax.Array:
    """Arrays `[n, ...]` of each place of a pattern as `[n · places, ...]`, layer after layer."""
    return jnp.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])


def _rows(stack: Any) -> Iterator[Any]:
    if isinstance(stack, np.ndarray):
        return iter(stack)
    # Not by index: the gradient of a split is one concatenation, that of each index a whole stack of zeros.
    return (part[0] for part in jax.lax.split(stack, [1] * stack.shape[0]))
