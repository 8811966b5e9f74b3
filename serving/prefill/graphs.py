"""The graphs of integer prefill: which buckets there are, and what is traced for each."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Bucket, Kind, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel, part_of_sub_model
from jaxllm.kv.cache import Places, new_cache
from jaxllm.models.parameters import Params
from jaxllm.prefill import subgraphs, whole_layer
from jaxllm.prefill.products import PRODUCTS, product_sizes
from jaxllm.prefill.shadow import FloatRows
from jaxllm.prefill.subgraphs import STAGE_PARAMETERS, LayerCalibration, Stage
from jaxllm.quant import BlockedArray, from_blocks
from serving.lowering import layer_params, shapes_of
from serving.options import EngineOptions

# Places in `PRODUCTS` of those whose excess the graph of a kind multiplies.
SHADOWS_OF: Mapping[str, tuple[int, ...]] = {
    "int_project_shadow": (PRODUCTS.index("project"),),
    "int_attend_shadow": (PRODUCTS.index("out"),),
    "int_widen_shadow": (PRODUCTS.index("widen"),),
    "int_narrow_shadow": (PRODUCTS.index("narrow"),),
    "int_layer_shadow": tuple(range(len(PRODUCTS))),
}
# Of stages that are another graph where there is a shadow.
_WITH_AND_WITHOUT: tuple[Stage, ...] = ("attend", "layer")
_STAGE_OF: Mapping[str, Stage] = {
    **{f"int_{stage}": stage for stage in STAGE_PARAMETERS},
    **{f"int_{stage}_shadow": stage for stage in _WITH_AND_WITHOUT},
}
SUBGRAPH_KINDS: frozenset[Kind] = frozenset(_STAGE_OF)  # pyright: ignore[reportAssignmentType]: kinds


def kind_of(stage: Stage, *, shadowed: bool) -> Kind:
    """The kind of bucket of a stage of a layer with or without shadow."""
    apart = shadowed and stage in _WITH_AND_WITHOUT
    return f"int_{stage}_shadow" if apart else f"int_{stage}"  # pyright: ignore[reportReturnType]: a kind


def known_to(kind: Kind, calibration: LayerCalibration) -> LayerCalibration:
    """Of a layer's calibration what the graph of a kind takes: steps, and the rows of its own products."""
    products = SHADOWS_OF.get(kind, ())
    if not products or calibration.rows is None:
        return LayerCalibration(calibration.steps)
    nothing = FloatRows(np.zeros(0, np.int32), ())  # pyright: ignore[reportArgumentType]: of the host
    rows = (own if product in products else nothing for product, own in enumerate(calibration.rows))
    return LayerCalibration(calibration.steps, tuple(rows))


def stage_params(
    params: Params | CountedSubModel, layer: int, like: int, kind: Kind
) -> dict[str, Any] | CountedSubModel:
    """The parameters that the graph of a kind takes of a layer, under the names of another's."""
    found = layer_params(params, layer, like)
    prefix = f"layers.{like}."
    starts = tuple(prefix + each for each in STAGE_PARAMETERS[_STAGE_OF[kind]])
    if not isinstance(found, CountedSubModel):
        return {name: each for name, each in found.items() if name.startswith(starts)}
    whole = {name: each for name, each in found.whole.items() if name.startswith(starts)}
    places = tuple(place for place in found.places if place.name in whole)
    return dataclasses.replace(found, whole=whole, places=places)


def stage_bytes(params: Params | CountedSubModel, layer: int, stage: Stage) -> int:
    """What the weights of a stage take."""
    found = stage_params(params, layer, layer, kind_of(stage, shadowed=False))
    whole = found.whole if isinstance(found, CountedSubModel) else found
    return sum(leaf.nbytes for leaf in jax.tree.leaves(whole))


def without_blocks(weights: Any) -> Any:
    """Weights as processors without native kernels multiply them: in rows, not in blocks; on the host."""

    def in_rows(weight: Any) -> Any:
        return from_blocks(weight) if isinstance(weight, BlockedArray) else weight

    return jax.tree.map(in_rows, weights, is_leaf=lambda each: isinstance(each, BlockedArray))


def lower_subgraph(
    bucket: Bucket,
    cfg: ModelConfig,
    params: Params | CountedSubModel,
    options: EngineOptions,
    *,
    blocks: bool = True,
) -> jax.stages.Lowered:
    """Traces the graph of one of `SUBGRAPH_KINDS` (see `serving.lowering.lower`), of weights that stay in
    blocks if they are, or `without_blocks`."""
    layer, kind = bucket.layer, bucket.kind
    weights = stage_params(params, layer, layer, kind)
    weights = shapes_of(weights if blocks else without_blocks(weights))
    # Where a graph serves all levels, units are those of the whole model.
    own = cfg.whole if isinstance(params, CountedSubModel) else cfg
    known = shapes_of(_calibration_shapes(bucket, own))

    def bound(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Params | CountedSubModel, *rest: Any) -> Any:
            return step(part_of_sub_model(params, cfg), *rest, cfg=cfg, layer=layer)

        return run

    of = _Shapes(bucket, own, options)
    if kind in ("int_layer", "int_layer_shadow"):
        pass_layer = jax.jit(bound(whole_layer.pass_layer), donate_argnums=(4, 5))
        return pass_layer.lower(weights, known, of.x, of.at, of.past, of.mass)
    if kind in ("int_attend", "int_attend_shadow"):
        shadows = of.heads if kind == "int_attend_shadow" else None
        attend = jax.jit(bound(subgraphs.attend), donate_argnums=(5, 6))
        return attend.lower(weights, known, of.heads, shadows, of.at, of.past, of.mass)
    step, rest = {
        "int_project": (subgraphs.project, (of.x,)),
        "int_project_shadow": (subgraphs.project_shadow, (of.x,)),
        "int_finish": (subgraphs.finish, (of.x, of.out)),
        "int_widen": (subgraphs.widen, (of.x, of.out, of.x)),
        "int_widen_shadow": (subgraphs.widen_shadow, (of.x,)),
        "int_narrow": (subgraphs.narrow, (of.x, of.products, of.products)),
        "int_narrow_shadow": (subgraphs.narrow_shadow, (of.x, of.x, of.hidden)),
    }[kind]
    return jax.jit(bound(step)).lower(weights, known, *rest)


class _Shapes:
    """The shapes that subgraphs of one layer pass to each other."""

    def __init__(self, bucket: Bucket, cfg: ModelConfig, options: EngineOptions) -> None:
        dtype, tokens, units = jnp.dtype(options.activation_dtype), bucket.tokens, cfg.units(bucket.layer)

        def floats(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((1, tokens, *shape), dtype)

        heads, size = units.kv_heads, cfg.head_dim
        self.x = floats(cfg.hidden_size)
        self.out = floats(heads, cfg.group * size)
        self.heads = [self.out, floats(heads, size), floats(heads, size)]
        self.hidden = floats(units.neurons)
        self.products = [self.hidden] * (2 if cfg.gated_ffn else 1)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        positions = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        self.at = Places(positions, scalar, run=True)  # pyright: ignore[reportArgumentType]: shapes
        make = functools.partial(
            new_cache,
            cfg,
            batch=1,
            tokens=bucket.cache_tokens,
            dtype=jnp.dtype(options.cache_dtype),
            mass=bool(options.kv_codec),
        )
        cache = jax.eval_shape(make)
        self.past = cache.keys[bucket.layer], cache.values[bucket.layer]
        self.mass = cache.mass


def _calibration_shapes(bucket: Bucket, cfg: ModelConfig) -> LayerCalibration:
    """What `known_to` gives for the bucket's kind, of the bucket's number of rows."""
    rows = []
    for product in range(len(PRODUCTS)):
        # Rows have the whole model's outputs at every level.
        inputs, _ = product_sizes(cfg, bucket.layer, product)
        _, outputs = product_sizes(cfg.whole, bucket.layer, product)
        own = tuple(np.zeros((bucket.rows, each), np.float16) for each in outputs)
        rows.append(FloatRows(np.zeros(inputs, np.int32), own))  # pyright: ignore[reportArgumentType]
    steps = np.zeros(len(PRODUCTS), np.float32)
    return known_to(bucket.kind, LayerCalibration(steps, tuple(rows)))  # pyright: ignore[reportArgumentType]
