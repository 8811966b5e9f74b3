"""Runs a step with the weights of one layer in memory at a time.

The traced operations of a step are divided where they begin to use another layer's weights. Each segment is
compiled and run alone, equal ones, as of equal layers, compiled once.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxllm.bundle.layout import segment_of
from jaxllm.export.subject import shapes_of


def run_by_layer(step: Callable[..., Any], weights: Mapping[str, np.ndarray], *inputs: Any) -> dict[str, Any]:
    """The results of `step(weights, *inputs)`, arrays by name, none of them a weight. Only an operation that
    itself uses several layers, such as a loop over tokens, has the weights of all of them.

    Args:
      weights: arrays by name, read when a segment uses them (see `jaxllm.export.subject.Arrays`).
      inputs: trees of arrays.
    """
    closed, shapes = jax.make_jaxpr(step, return_shape=True)(shapes_of(weights), *inputs)
    jaxpr, names = closed.jaxpr, sorted(weights)
    weight_of = dict(zip(jaxpr.invars, names, strict=False))
    values: dict[Any, Any] = dict(zip(jaxpr.invars[len(names) :], jax.tree.leaves(inputs), strict=True))
    values |= zip(jaxpr.constvars, closed.consts, strict=True)
    segments = list(_segments(jaxpr, weight_of))
    # By variable, the last segment that uses it.
    last = {
        each: at for at, segment in enumerate(segments) for of in segment for each in _variables(of.invars)
    }
    last |= dict.fromkeys(_variables(jaxpr.outvars), len(segments))
    compiled: dict[str, Callable[..., Any]] = {}
    for at, segment in enumerate(segments):
        defined = dict.fromkeys(each for of in segment for each in of.outvars)
        outputs = [each for each in defined if last.get(each, -1) > at]
        used = dict.fromkeys(each for of in segment for each in _variables(of.invars))
        given = [each for each in used if each not in defined]
        facts = jaxpr.debug_info.with_unknown_names()
        own = jaxpr.replace(constvars=[], invars=given, outvars=outputs, eqns=segment, debug_info=facts)
        if (text := str(own)) not in compiled:
            compiled[text] = jax.jit(core.jaxpr_as_fun(closed.replace(jaxpr=own, consts=[])))
        arrays = [
            jax.device_put(weights[weight_of[each]]) if each in weight_of else values[each] for each in given
        ]
        values |= zip(outputs, jax.block_until_ready(compiled[text](*arrays)), strict=True)
        values = {each: value for each, value in values.items() if last.get(each, -1) > at}
        # Before others are read: JAX gives up arrays of the host when garbage is collected.
        del arrays
        gc.collect(0)
    results = [each.val if isinstance(each, core.Literal) else values[each] for each in jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _segments(jaxpr: Any, weight_of: Mapping[Any, str]) -> Iterator[list[Any]]:
    """The operations that results depend on, divided where they begin to use another layer's weights."""
    needed, wanted = [], set(_variables(jaxpr.outvars))
    for each in reversed(jaxpr.eqns):
        if wanted & set(each.outvars):
            needed.append(each)
            wanted.update(_variables(each.invars))
    segment, layers = [], set[str]()
    for each in reversed(needed):
        own = {segment_of(weight_of[one]) for one in _variables(each.invars) if one in weight_of}
        if layers and not own <= layers:
            yield segment
            segment, layers = [], set()
        segment.append(each)
        layers |= own
    yield segment


def _variables(atoms: Any) -> list[Any]:
    return [each for each in atoms if not isinstance(each, core.Literal)]
