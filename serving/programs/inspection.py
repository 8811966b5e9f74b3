"""Inspects StableHLO programs, operation by operation, before any of it is compiled.

A folder of programs may come from anywhere, and a compiled program runs with this process's rights: a custom
call reaches into the process, by the index of a callback or by an address. Programs of `jaxllm export` make
no custom calls, have static shapes, and loop only over the experts of a mixture or the tokens of a block; all
others are refused. To parse a program may take for ever or end the process, so `screening.py` has another
process do it.
"""

import functools
import math
import re
from typing import Any

import jax.export
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxllm.errors import ProgramError
from serving.programs.allowance import Allowance

# Pure functions of arrays. Left out are calls of anything outside of the program, communication, and dynamic
# shapes.
_PURE = (
    "abs", "add", "and", "bitcast_convert", "broadcast_in_dim", "case", "ceil", "clamp", "compare",
    "composite", "concatenate", "constant", "convert", "cosine", "divide", "dot_general", "dynamic_slice",
    "dynamic_update_slice", "exponential", "exponential_minus_one", "floor", "gather", "iota", "log",
    "log_plus_one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "optimization_barrier",
    "or", "pad", "power", "reduce", "reduce_window", "remainder", "reshape", "return", "reverse",
    "round_nearest_even", "rsqrt", "scatter", "select", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sine", "slice", "sort", "sqrt", "subtract", "tanh", "transpose", "xor",
)  # fmt: skip
_OPERATIONS = frozenset({*(f"stablehlo.{each}" for each in _PURE), "func.call", "func.return"})
_LOOP, _CUSTOM_CALL, _FUNCTION = "stablehlo.while", "stablehlo.custom_call", "func.func"
# Composites that XLA implements; their decomposition is a function of the program, too.
_COMPOSITES = frozenset({"chlo.top_k"})
_MODULE_FACTS = frozenset(
    {"sym_name", "jax.uses_shape_polymorphism", "mhlo.num_partitions", "mhlo.num_replicas"}
)
_TENSOR = re.compile(r"tensor<((?:\d{1,18}x){0,8})(i1|u?i(?:8|16|32|64)|f16|bf16|f32|f64)>")
# Operations whose results may be far smaller than their operands.
_READERS = frozenset({"stablehlo.reduce", "stablehlo.scatter"})
# Work of sorting n elements: at most this times n.
_SORTING = 64


def inspect(program: bytes, allowed: Allowance) -> None:
    """Raises ProgramError unless a program that `jax.export` serialized is within its limits; any other error
    that JAX raises means that it is malformed."""
    exported = jax.export.deserialize(bytearray(program))
    if exported.nr_devices != 1 or exported.ordered_effects or exported.unordered_effects:
        raise ProgramError("it is made for several devices, or has effects")
    for what, avals, wanted in (
        ("takes", exported.in_avals, allowed.inputs),
        ("gives", exported.out_avals, allowed.outputs),
    ):
        found = tuple((tuple(each.shape), each.dtype.name) for each in avals)
        if found != wanted:
            differing = [pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]][:1]
            raise ProgramError(
                f"it {what} {len(found)} arrays, and the manifest says {len(wanted)}, or others: {differing}"
            )
    if tuple(exported.module_kept_var_idx) != tuple(range(len(allowed.inputs))):
        raise ProgramError("it leaves out some of what it takes")
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        _Module(module, allowed).check()


class _Module:
    """One program's functions."""

    def __init__(self, module: Any, allowed: Allowance) -> None:
        self._module, self._allowed = module, allowed
        self._functions: dict[str, Any] = {}
        # Operations and work of each function, its calls included; None while they are being computed.
        self._costs: dict[str, tuple[int, int] | None] = {}

    def check(self) -> None:
        _require_attributes("the module", self._module.operation, _MODULE_FACTS)
        for each in self._module.body:
            operation = each.operation
            if operation.name != _FUNCTION:
                raise ProgramError(f"it holds {operation.name} beside its functions")
            self._functions[ir.StringAttr(operation.attributes["sym_name"]).value] = operation
        if "main" not in self._functions:
            raise ProgramError("it has no main function")
        for name in self._functions:
            operations, work = self._cost(name)
            if operations > self._allowed.operations or work > self._allowed.work:
                raise ProgramError(
                    f"{name} takes {operations} operations on {work} numbers, and a model of its size at "
                    f"most {self._allowed.operations} on {self._allowed.work}"
                )

    def _cost(self, name: str) -> tuple[int, int]:
        if name not in self._functions:
            raise ProgramError(f"it calls a function {name!r:.80} that it does not hold")
        if name in self._costs:
            if (known := self._costs[name]) is None:
                raise ProgramError(f"{name!r:.80} calls itself")
            return known
        self._costs[name] = None
        function = self._functions[name]
        _require_attributes(name, function, frozenset())
        for kind in ("arg_attrs", "res_attrs"):
            if kind in function.attributes:
                _require_told(name, function.attributes[kind])
        cost = self._body_cost(function)
        self._costs[name] = cost
        return cost

    def _body_cost(self, parent: Any) -> tuple[int, int]:
        operations = work = 0
        for region in parent.regions:
            for block in region:
                for argument in block.arguments:
                    self._elements(argument.type)
                for each in block:
                    more = self._operation_cost(each.operation)
                    operations, work = operations + more[0], work + more[1]
        return operations, work

    def _operation_cost(self, operation: Any) -> tuple[int, int]:
        name = operation.name
        if name == _CUSTOM_CALL:
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            raise ProgramError(f"it calls {target!r:.80} outside of itself, which no exported program does")
        if name not in _OPERATIONS and not (name == _LOOP and self._allowed.loops):
            raise ProgramError(f"it holds {name!r:.80}, which no exported program of such a model does")
        _require_attributes(name, operation, frozenset())
        sizes = [self._elements(each.type) for each in operation.results]
        operands = [self._elements(each.type) for each in operation.operands]
        operations, work = self._body_cost(operation)
        work += sum(sizes) * _factor(operation, sizes, operands)
        work += sum(operands) if name in _READERS else 0
        callee = _callee(operation)
        if callee is not None:
            called = self._cost(callee)
            operations, work = operations + called[0], work + called[1]
        return operations + 1, work

    def _elements(self, kind: Any) -> int:
        """The size of an array of a type."""
        elements = _elements(str(kind))
        if elements > self._allowed.largest_elements:
            raise ProgramError(
                f"it holds an array of {elements} numbers, and a model of its size at most "
                f"{self._allowed.largest_elements}"
            )
        return elements


@functools.lru_cache(maxsize=4096)
def _elements(kind: str) -> int:
    found = _TENSOR.fullmatch(kind)
    if found is None:
        raise ProgramError(f"it holds a value of type {kind:.80}, which is not an array of a known size")
    return math.prod(int(each) for each in found[1].split("x") if each)


def _factor(operation: Any, sizes: list[int], operands: list[int]) -> int:
    """The work of an operation per element of its results."""
    if operation.name == "stablehlo.dot_general":
        # Of [B, M, K] by [B, K, N] to [B, M, N]: at least K.
        return math.isqrt(operands[0] * operands[1] // max(1, sizes[0])) + 1
    if operation.name == "stablehlo.reduce_window":
        return math.prod(ir.DenseI64ArrayAttr(operation.attributes["window_dimensions"])) + 1
    return _SORTING if operation.name == "stablehlo.sort" else 1


def _callee(operation: Any) -> str | None:
    """The function that an operation calls, if it is a call."""
    if operation.name == "func.call":
        return ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
    if operation.name == "stablehlo.composite":
        name = ir.StringAttr(operation.attributes["name"]).value
        if name not in _COMPOSITES:
            raise ProgramError(f"it holds the composite {name!r:.80}, which no exported program does")
        return ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value
    return None


def _require_attributes(what: str, operation: Any, facts: frozenset[str]) -> None:
    """Raises ProgramError if an operation has attributes of another dialect, whose names have a dot."""
    for name in operation.attributes:
        if "." in name and name not in facts:
            raise ProgramError(f"{what} bears {name!r:.80}, which no exported program does")


def _require_told(what: str, attributes: Any) -> None:
    """Raises ProgramError if arguments or results have other attributes than their names."""
    for each in ir.ArrayAttr(attributes):
        for named in ir.DictAttr(each):
            if not named.name.startswith("jax."):
                raise ProgramError(f"what {what} takes or gives bears {named.name!r:.80}")
