"""Buckets of integer prefill: stages of a layer on two processors, or a whole layer on one."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import sub_model
from jaxllm.int8_prefill.schedule import STAGE_PARAMETERS, STAGE_VALUES, Stage
from jaxllm.int8_prefill.shadow import NARROW, OUT, PRODUCTS, PROJECT, WIDEN, FloatRows, product_sizes
from jaxllm.int8_prefill.subgraphs import IntegerLayer, LayerCalibration, calibration_arrays
from jaxllm.kernels.native_call import PARAMETER
from jaxllm.models.layer_stack import STACK, LayerStack, by_address
from jaxllm.models.parameters import Params
from jaxllm.quant import BlockedArray, from_blocks
from jaxllm.serving.buckets.bucket import (
    SCALAR,
    Bucket,
    ModelShapes,
    Placement,
    ids,
    layer_params,
    layer_shapes,
    position_shapes,
    shapes_of,
)
from jaxllm.serving.host.machine import Device
from jaxllm.steps.integer import prefill_integer_chunk

# Indices in `PRODUCTS` of the products whose shadow a stage computes; with the cache, in shadowed layers.
_SHADOWS: Mapping[Stage, tuple[int, ...]] = {
    "project_shadow": (PROJECT,), "widen_shadow": (WIDEN,), "narrow_shadow": (NARROW,),
    "attend": (OUT,), "layer": tuple(range(len(PRODUCTS))),
}  # fmt: skip
# Stages with the cache as an input.
WITH_CACHE: tuple[Stage, ...] = ("attend", "layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerStageBucket(Bucket):
    """Runs one stage of a layer over a chunk (see `jaxllm.int8_prefill.subgraphs`).

    Attributes:
      stage: stage of the layer.
      shadowed: whether the layer has a shadow and the stage computes differently for it.
      tokens: length of the chunk, including padding.
      cache_tokens: length of the cache; 0 for stages without it.
      layer: the first of the layers that share the bucket.
      float_rows: number of channels with float rows; 0 for stages without a shadow.
      device: name of the device, such as "cpu:1"; empty for the first device.
      blocks: whether weights are in blocks, the format of native kernels.
      own_cores: whether it only uses the calling thread, next to another processor.
    """

    stage: Stage
    shadowed: bool
    tokens: int
    cache_tokens: int
    layer: int
    float_rows: int
    device: str = ""
    blocks: bool = True
    own_cores: bool = False

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(stage's params, its calibration, operands...) -> see `IntegerLayer`."""
        known_by = model.params if takes_addresses(self.stage, model.cfg) else model.weights
        weights = _of_stage(layer_shapes(known_by, self.layer), self.layer, self.stage)
        if not self.blocks:
            zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), weights)
            weights = shapes_of(without_blocks(zeros))
        # A bucket of all levels has the units of the whole model.
        counted = isinstance(model.params.get(STACK), LayerStack)
        own = model.cfg.whole if counted else model.cfg

        def run(params: Params, calibration: LayerCalibration, *operands: Any) -> Any:
            layer = IntegerLayer(sub_model(params, model.cfg), calibration, model.cfg, self.layer)
            return getattr(layer, self.stage)(*operands)

        every = calibration_shapes(own, self.layer, self.float_rows)
        known = shapes_of(known_to(every, self.stage, shadowed=self.shadowed))
        operands = _operand_shapes(self, dataclasses.replace(model, cfg=own))
        names = STAGE_VALUES[self.stage][0]
        donated = [2 + place for place, name in enumerate(names) if name in ("past", "mass")]
        where = self.placement
        with contextlib.nullcontext() if where is None else jax.default_device(where.device):
            return jax.jit(run, donate_argnums=donated).lower(weights, known, *operands)

    @property
    def placement(self) -> Placement | None:
        """See `Bucket`."""
        if not self.device:
            return None
        # XLA's own threads would use the other processor's cores.
        options = (("xla_cpu_multi_thread_eigen", False),) if self.own_cores else ()
        platform, number = self.device.split(":")
        return Placement(jax.devices(platform)[int(number)], self.blocks, options)


def takes_addresses(stage: Stage, cfg: ModelConfig) -> bool:
    """Whether a stage accepts its layer like the model's other buckets, possibly by address. The shadow
    stages of two processors need single rows of weights, as do shadows after norms with biases, which no
    native kernel adds."""
    return stage == "layer" and cfg.norm == "rms"


def shadow_products(stage: Stage, *, shadowed: bool) -> tuple[int, ...]:
    """Indices in `PRODUCTS` of the products whose shadow a stage computes, in a layer with or without one."""
    return _SHADOWS.get(stage, ()) if shadowed or stage not in WITH_CACHE else ()


def known_to(calibration: LayerCalibration, stage: Stage, *, shadowed: bool) -> LayerCalibration:
    """A stage's part of a layer's calibration: activation scales, and the float rows of its products."""
    products = shadow_products(stage, shadowed=shadowed)
    if not products or calibration.rows is None:
        return LayerCalibration(calibration.steps)
    nothing = FloatRows(np.zeros(0, np.int32), ())  # pyright: ignore[reportArgumentType]: of the host
    rows = (own if product in products else nothing for product, own in enumerate(calibration.rows))
    return LayerCalibration(calibration.steps, tuple(rows))


def stage_params(params: Params, layer: int, like: int, stage: Stage) -> dict[str, Any]:
    """The parameters of a stage of `layer`, under the names of layer `like`."""
    return _of_stage(layer_params(params, layer, like), like, stage)


def _of_stage(found: dict[str, Any], like: int, stage: Stage) -> dict[str, Any]:
    """The parameters of a stage among a layer's parameters or their shapes."""
    prefix = f"layers.{like}."
    starts = tuple(prefix + each for each in STAGE_PARAMETERS[stage])
    if STACK in found:
        return found
    return {name: each for name, each in found.items() if name.startswith((*starts, prefix + PARAMETER))}


def without_blocks(weights: Any) -> Any:
    """Weights in rows instead of blocks, on the host: the format of processors without native kernels."""

    def in_rows(weight: Any) -> Any:
        return from_blocks(weight) if isinstance(weight, BlockedArray) else weight

    return jax.tree.map(in_rows, weights, is_leaf=lambda each: isinstance(each, BlockedArray))


def device_name(device: Device) -> str:
    """The name of a device in this process, "platform:index"."""
    return f"{device.platform}:{jax.devices(device.platform).index(device)}"


def _operand_shapes(bucket: IntegerStageBucket, model: ModelShapes) -> tuple[Any, ...]:
    """Shapes of the operands of a stage (see `STAGE_VALUES`)."""
    cfg, tokens = model.cfg, bucket.tokens
    units = cfg.units(bucket.layer)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, tokens, *shape), model.dtype)

    x, out = floats(cfg.hidden_size), floats(units.kv_heads, cfg.group * cfg.head_dim)
    heads = [out, *[floats(units.kv_heads, cfg.head_dim)] * 2]
    hidden = floats(units.neurons)
    products = [hidden] * (2 if cfg.gated_ffn else 1)
    shapes: dict[str, Any] = {
        "x": x, "block": x, "added": x, "mixed": x, "out": out, "hidden": hidden,
        "products": products, "product_shadows": products,
        "heads": heads, "head_shadows": heads if bucket.shadowed else None,
    }  # fmt: skip
    if bucket.cache_tokens:
        past, mass = model.past(bucket.layer, bucket.cache_tokens), model.cache(bucket.cache_tokens).mass
        shapes |= {"at": position_shapes(tokens), "past": past, "mass": mass}
    return tuple(shapes[name] for name in STAGE_VALUES[bucket.stage][0])


def calibration_shapes(cfg: ModelConfig, layer: int, float_rows: int) -> LayerCalibration:
    """Arrays of zeros in the shapes of a shadowed layer's calibration with `float_rows` float rows."""
    rows = []
    for product in range(len(PRODUCTS)):
        # Rows have the whole model's outputs at every level.
        inputs, _ = product_sizes(cfg, layer, product)
        _, outputs = product_sizes(cfg.whole, layer, product)
        own = tuple(np.zeros((float_rows, each), np.float16) for each in outputs)
        rows.append(FloatRows(np.zeros(inputs, np.int32), own))  # pyright: ignore[reportArgumentType]
    steps = np.zeros(len(PRODUCTS), np.float32)
    return LayerCalibration(steps, tuple(rows))  # pyright: ignore[reportArgumentType]: of the host


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerChunkBucket(Bucket):
    """Prefills one chunk of a prompt in integers (see `steps.integer.prefill_integer_chunk`).

    Attributes:
      tokens: length of the chunk, padding included.
      cache_tokens: length of the cache.
      shadowed: per layer, whether it has a shadow.
      float_rows: number of channels with float rows of a layer with a shadow.
    """

    tokens: int
    cache_tokens: int
    shadowed: tuple[bool, ...]
    float_rows: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, row, valid, last, cache) -> logits, counts of outliers, cache."""
        row, flag = ids(1, self.tokens), jax.ShapeDtypeStruct((), jnp.bool_)
        beside = []
        for layer in range(model.cfg.layers):
            known = calibration_shapes(model.cfg.whole, layer, self.float_rows)
            known = known if self.shadowed[layer] else LayerCalibration(known.steps)
            beside.append(shapes_of(calibration_arrays(known)))
        params: Any = by_address(model.weights, model.cfg.whole, beside)
        step = model.jitted(prefill_integer_chunk, 4)
        return step.lower(params, row, SCALAR, flag, model.cache(self.cache_tokens))
