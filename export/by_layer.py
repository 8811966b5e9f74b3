"""Runs a step with the weights of one layer in memory at a time.

The traced operations of a step are divided where they begin to use another layer's weights. Each segment is
compiled and run on its own, and equal ones, as of equal layers, are compiled once.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxllm.bundle.layout import segment_of
from jaxllm.export.subject import shapes_of


def run_by_layer(step: Callable[..., Any], weights: Mapping[str, np.ndarray], *inputs: Any) -> Any:
    """The results of `step(weights, *inputs)`. Only an operation that itself uses several layers, such as a
    loop over tokens, has the weights of all of them.

    Args:
      weights: arrays by name, read when a segment uses them (see `jaxllm.export.subject.Arrays`).
      inputs: trees of arrays.
    """
    names = sorted(weights)
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(shapes_of(weights), *inputs)
    jaxpr = closed.jaxpr
    weight_of = dict(zip(jaxpr.invars, names, strict=False))
    values: dict[Any, Any] = dict(zip(jaxpr.invars[len(names) :], jax.tree.leaves(inputs), strict=True))
    values |= zip(jaxpr.constvars, closed.consts, strict=True)
    segments = list(_segments(_needed(jaxpr), weight_of))
    # By variable, the last segment that uses it.
    last = {each: at for at, segment in enumerate(segments) for each in _used(segment)}
    last |= {each: len(segments) for each in _variables(jaxpr.outvars)}
    compiled: dict[str, Callable[..., Any]] = {}
    for at, segment in enumerate(segments):
        defined = [each for of in segment for each in of.outvars]
        outputs = [each for each in defined if last.get(each, -1) > at]
        given = [each for each in _used(segment) if each not in set(defined)]
        own = jaxpr.replace(
            constvars=[],
            invars=given,
            outvars=outputs,
            eqns=segment,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        text = str(own)
        if text not in compiled:
            compiled[text] = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(own, [])))
        arguments = [
            jax.device_put(weights[weight_of[each]], may_alias=True) if each in weight_of else values[each]
            for each in given
        ]
        found = compiled[text](*arguments)
        values |= zip(outputs, jax.block_until_ready(found), strict=True)
        # Before the next segment's weights are read. JAX gives up arrays of the host when garbage is collected.
        del arguments
        gc.collect(0)
        values = {each: value for each, value in values.items() if last.get(each, -1) > at}
    results = [
        each.val
        if isinstance(each, core.Literal)
        else values[each]
        if each in values
        else weights[weight_of[each]]
        for each in jaxpr.outvars
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _segments(operations: Any, weight_of: Mapping[Any, str]) -> Iterator[list[Any]]:
    """The operations in order, divided where they begin to use another layer's weights."""
    segment: list[Any] = []
    layers = set[str]()
    for each in operations:
        own = {segment_of(weight_of[one]) for one in _variables(each.invars) if one in weight_of}
        if own and layers and not own <= layers:
            yield segment
            segment, layers = [], set()
        segment.append(each)
        layers |= own
    yield segment


def _needed(jaxpr: Any) -> list[Any]:
    """The operations that results depend on, in order."""
    found, wanted = [], set(_variables(jaxpr.outvars))
    for each in reversed(jaxpr.eqns):
        if wanted & set(each.outvars):
            found.append(each)
            wanted.update(_variables(each.invars))
    return found[::-1]


def _used(operations: Any) -> list[Any]:
    """The variables that operations use, in order."""
    return list(dict.fromkeys(each for of in operations for each in _variables(of.invars)))


def _variables(atoms: Any) -> list[Any]:
    return [each for each in atoms if not isinstance(each, core.Literal)]
