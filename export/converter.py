"""Converts StableHLO bytes to one `.tflite` model with LiteRT's converter, whose buffers are then shared.

Parts of the converter's Python modules are internal: they are used only here, at the version that the extra
pins. The converter does not support loops, sorts, bit operations or bfloat16 products.

Matrices that are described by an `Argument` stay arguments for the converter, and are placed in its model
afterwards (see `placed.py`); arrays become constants before.

Buffers are stored after the flatbuffer, each with an offset and a size (`Buffer.offset`, `Buffer.size` of
the schema), so that two may refer to the same bytes: equal buffers are stored once, and so is a buffer that
is a prefix of a larger one, as a level's matrices are of the whole model's. Scales and zero points of
channels are repeated with every use of a matrix: equal vectors of them are written once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
import xxhash

from jaxllm.errors import ConfigError, one_line
from jaxllm.export.folder_format.parts import Argument
from jaxllm.export.lookups import content_of, put_lookups
from jaxllm.export.placed import MATRIX, PlacedMatrices
from jaxllm.export.quantized import FAKE_QUANT
from jaxllm.kernels.native import without_native_kernels

_LEGALIZE = "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts)"
_IDENTIFIER = b"TFL3"
_ALIGN = 64
# Smaller buffers, such as shapes and axes, stay in the flatbuffer.
_LEAST_SHARED_BYTES = 1024


# An array, or a description of one that is read later.
Given = np.ndarray | Argument


class Traced(NamedTuple):
    """Signature for the converter: StableHLO bytes whose first arguments are `weights`, and the names of
    the other arguments and of the results."""

    name: str
    code: bytes
    weights: Sequence[Given]
    inputs: Sequence[str]
    outputs: Sequence[str]


def traced(
    name: str, step: Callable[..., Any], weights: Mapping[str, Given], *inputs: Mapping[str, Any]
) -> Traced:
    """Traces a step of weights and shapes of inputs, each by name, with XLA's kernels, for a CPU. Unused
    arguments stay, so that positions match."""
    given = {
        each: jax.ShapeDtypeStruct(array.shape, array.dtype if isinstance(array, np.ndarray) else np.float32)
        for each, array in weights.items()
    }
    with without_native_kernels():
        exported = jax.export.export(jax.jit(step, keep_unused=True), platforms=("cpu",))(given, *inputs)
    return Traced(
        name,
        exported.mlir_module_serialized,
        # As JAX flattens them.
        [weights[each] for each in sorted(weights)],
        [each for shapes in inputs for each in sorted(shapes)],
        sorted(jax.tree.unflatten(exported.out_tree, exported.out_avals)),
    )


def convert(signatures: Sequence[Traced]) -> bytes:
    """Converts all signatures to one model, with their arrays as constants, and matrices that are described
    as arguments.

    Raises:
      ConfigError: the converter rejects the model.
    """
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import converter_api_ext

    context = ir.Context()
    converter_api_ext.prepare_mlir_context(context)
    context.allow_unregistered_dialects = True
    modules = []
    try:
        for each in signatures:
            with context, ir.Location.unknown():
                module = ir.Module.parse(each.code)
                passmanager.PassManager.parse(_LEGALIZE).run(module.operation)
                if _marks_to_calls(module):
                    passmanager.PassManager.parse("builtin.module(symbol-dce)").run(module.operation)
                _put_constants(module, each.weights)
                placed = [f"{MATRIX}{of.stored}" for of in each.weights if isinstance(of, Argument)]
                converter_api_ext.set_signature(
                    module.operation,
                    signature_name=each.name,
                    input_names=[*placed, *each.inputs],
                    output_names=list(each.outputs),
                )
            modules.append(module)
        merged = converter_api_ext.merge_modules(modules)
        config = converter_api_ext.ConvertToTFLConfig()
        config.model_origin_framework = "PYTORCH"
        config.enable_x64 = False
        config.strict_qdq_mode = True
        config.unsafe_fuse_dynamic_shaped_broadcast = True
        with context:
            converter_api_ext.run_convert_to_tfl_passes(merged, passmanager.PassManager(), config)
            return bytes(converter_api_ext.export_flatbuffer_to_bytes(merged.operation))
    except (RuntimeError, ValueError, ir.MLIRError) as error:
        raise ConfigError(
            f"LiteRT's converter cannot take this model ({one_line(error)}); export it as stablehlo"
        ) from error


def _put_constants(module: Any, weights: Sequence[Given]) -> None:
    """Replaces the arguments of a module's `main` that are arrays by constants."""
    from litert_converter.mlir import ir

    (main,) = (
        each
        for each in module.body.operations
        if ir.StringAttr(each.operation.attributes["sym_name"]).value == "main"
    )
    block, replaced = main.regions[0].blocks[0], set[int]()
    with ir.InsertionPoint.at_block_begin(block):
        for index, weight in enumerate(weights):
            if isinstance(weight, Argument):
                continue
            shape = ir.RankedTensorType(block.arguments[index].type)
            value = ir.DenseElementsAttr.get(
                np.ascontiguousarray(weight), type=shape.element_type, shape=list(weight.shape)
            )
            made = ir.Operation.create("stablehlo.constant", results=[shape], attributes={"value": value})
            block.arguments[index].replace_all_uses_with(made.results[0])
            replaced.add(index)
    operation = main.operation
    signature = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value)
    for index in sorted(replaced, reverse=True):
        block.erase_argument(index)
    inputs = [each for index, each in enumerate(signature.inputs) if index not in replaced]
    rest = ir.FunctionType.get(inputs, signature.results)
    operation.attributes["function_type"] = ir.TypeAttr.get(rest)
    if "arg_attrs" in operation.attributes:
        facts = enumerate(ir.ArrayAttr(operation.attributes["arg_attrs"]))
        kept = [each for index, each in facts if index not in replaced]
        operation.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)


def _marks_to_calls(module: Any) -> int:
    """Rewrites the composites of `quantized.py` as calls that the converter supports, and counts them."""
    from litert_converter.mlir import ir
    from litert_converter.mlir.dialects import stablehlo

    count = 0

    def walk(regions: Any) -> None:
        nonlocal count
        for each in [each for region in regions for block in region.blocks for each in block.operations]:
            operation = each.operation
            walk(operation.regions)
            if operation.name != "stablehlo.composite":
                continue
            if ir.StringAttr(operation.attributes["name"]).value != FAKE_QUANT:
                continue
            facts = ir.DictAttr(operation.attributes["composite_attributes"])
            if not len(ir.DenseElementsAttr(facts["scale"])):
                # The converter supports composites without scales.
                continue
            with ir.InsertionPoint(operation), operation.location:
                # Constants of the decomposition come before the operand.
                call = stablehlo.CustomCallOp(
                    result=[result.type for result in operation.results],
                    inputs=[operation.operands[len(operation.operands) - 1]],
                    call_target_name=ir.StringAttr.get(FAKE_QUANT),
                )
                for index in range(len(facts)):
                    call.operation.attributes[facts[index].name] = facts[index].attr
            operation.results[0].replace_all_uses_with(call.operation.results[0])
            operation.erase()
            count += 1

    walk(module.operation.regions)
    return count


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Bytes of all buffers: stored separately, and shared."""

    apart_bytes: int
    stored_bytes: int


def write_model(path: Path, data: bytes, placed: PlacedMatrices) -> Sharing:
    """Writes a converted model with the bytes of equal buffers, and of prefixes of larger ones, stored once.

    Args:
      data: bytes of the model.
      placed: the matrices that are arguments.

    Raises:
      ConfigError: the converter gave an argument a form that is not known.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
    _share_scales(model)
    placed.place(schema, model, data)
    put_lookups(schema, model, data)
    large: list[tuple[Any, memoryview]] = []
    for buffer in model.buffers:
        content = content_of(buffer, data)
        if len(content) >= _LEAST_SHARED_BYTES:
            large.append((buffer, content))
    blobs: list[memoryview] = []
    begins: dict[tuple[int, bytes], int] = {}
    homes: list[int] = [0] * len(large)
    lengths = sorted({len(content) for _, content in large})
    # In descending size, so that a buffer is stored before its prefixes.
    for index in sorted(range(len(large)), key=lambda each: -len(large[each][1])):
        content = large[index][1]
        key = (len(content), xxhash.xxh3_128_digest(content))
        if key not in begins:
            blobs.append(content)
            digest, at = xxhash.xxh3_128(), 0
            for length in itertools.takewhile(len(content).__ge__, lengths):
                digest.update(content[at:length])
                at = length
                begins.setdefault((length, digest.digest()), len(blobs) - 1)
        homes[index] = begins[key]
    for buffer, content in large:
        buffer.data, buffer.offset, buffer.size = None, 2, len(content)
    placed.layout(model.buffers, 2, _ALIGN)

    def packed() -> bytes:
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    # Offsets are after the flatbuffer, whose size does not depend on them.
    start = end = len(packed())
    places = []
    for blob in blobs:
        end += -end % _ALIGN
        places.append(end)
        end += len(blob)
    for (buffer, _), home in zip(large, homes, strict=True):
        buffer.offset = places[home]
    with path.open("wb") as file:
        for place, blob in zip(places, blobs, strict=True):
            file.seek(place)
            file.write(blob)
        end = placed.layout(model.buffers, end, _ALIGN)
        file.truncate(end)
        placed.write(file, model.buffers)
        # Last, because matrices complete the scales, of which equal ones make it shorter.
        _share_scales(model)
        file.seek(0)
        file.write(packed())
    return Sharing(sum(each.size for each in model.buffers), end - start)


def _share_scales(model: Any) -> None:
    """Makes equal vectors of scales and zero points one object, which the builder writes once."""
    found: dict[tuple[Any, ...], Any] = {}
    for subgraph in model.subgraphs:
        for tensor in subgraph.tensors:
            if tensor.quantization is None:
                continue
            facts = sorted((name, each) for name, each in vars(tensor.quantization).items() if name != "Pack")
            key = tuple(each.tobytes() if isinstance(each, np.ndarray) else repr(each) for _, each in facts)
            if key not in found:
                found[key] = tensor.quantization
                found[key].Pack = functools.cache(found[key].Pack)
            tensor.quantization = found[key]
