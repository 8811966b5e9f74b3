"""Converts StableHLO bytes to one `.tflite` model with LiteRT's converter.

Parts of the converter's Python modules are internal: they are used only here, at the version that the extra
pins. The converter does not support loops, sorts, bit operations or bfloat16 products.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from jaxllm.errors import ConfigError, one_line
from jaxllm.export.quantized import FAKE_QUANT
from jaxllm.kernels.native import without_native_kernels

_LEGALIZE = "builtin.module(vhlo-legalize-stablehlo,reconcile-unrealized-casts)"


class Traced(NamedTuple):
    """Signature for the converter: StableHLO bytes whose first arguments are `weights`, and the names of
    the other arguments and of the results."""

    name: str
    code: bytes
    weights: Sequence[np.ndarray]
    inputs: Sequence[str]
    outputs: Sequence[str]


def exported_step(step: Callable[..., Any], *shapes: Any) -> jax.export.Exported:
    """Exports a step with XLA's kernels, for a CPU. Unused arguments stay, so positions match."""
    with without_native_kernels():
        return jax.export.export(jax.jit(step, keep_unused=True), platforms=("cpu",))(*shapes)


def result_names(exported: jax.export.Exported) -> list[str]:
    """The names of a step's results, in their order."""
    return sorted(jax.tree.unflatten(exported.out_tree, exported.out_avals))


def convert(signatures: Sequence[Traced]) -> bytes:
    """Converts all signatures to one model, with their weights as constants.

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
                converter_api_ext.set_signature(
                    module.operation,
                    signature_name=each.name,
                    input_names=list(each.inputs),
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


def _put_constants(module: Any, weights: Sequence[np.ndarray]) -> None:
    """Replaces the first arguments of a module's `main` by constants."""
    from litert_converter.mlir import ir

    (main,) = [each for each in module.body.operations if _symbol(each) == "main"]
    block = main.regions[0].blocks[0]
    with ir.InsertionPoint.at_block_begin(block):
        for index, weight in enumerate(weights):
            shape = ir.RankedTensorType(block.arguments[index].type)
            value = ir.DenseElementsAttr.get(
                np.ascontiguousarray(weight), type=shape.element_type, shape=list(weight.shape)
            )
            made = ir.Operation.create("stablehlo.constant", results=[shape], attributes={"value": value})
            block.arguments[index].replace_all_uses_with(made.results[0])
    count, operation = len(weights), main.operation
    signature = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value)
    for index in reversed(range(count)):
        block.erase_argument(index)
    rest = ir.FunctionType.get(signature.inputs[count:], signature.results)
    operation.attributes["function_type"] = ir.TypeAttr.get(rest)
    if "arg_attrs" in operation.attributes:
        attributes = ir.ArrayAttr(operation.attributes["arg_attrs"])
        kept = [attributes[index] for index in range(count, len(attributes))]
        operation.attributes["arg_attrs"] = ir.ArrayAttr.get(kept)


def _symbol(operation: Any) -> str:
    from litert_converter.mlir import ir

    return ir.StringAttr(operation.operation.attributes["sym_name"]).value


def _marks_to_calls(module: Any) -> int:
    """Rewrites the composites of `quantized.py` as calls that the converter supports, and counts them."""
    from litert_converter.mlir import ir
    from litert_converter.mlir.dialects import stablehlo

    count = 0

    def walk(block: Any) -> None:
        nonlocal count
        for each in list(block.operations):
            operation = each.operation
            for region in operation.regions:
                for inner in region.blocks:
                    walk(inner)
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

    for function in module.body.operations:
        for region in function.operation.regions:
            for block in region.blocks:
                walk(block)
    return count
