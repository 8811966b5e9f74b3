"""Places the matrices of a bundle in a converted model, and writes them after its flatbuffer one at a time.

The converter gets a program with its matrices as arguments (see `converter.py`), so that none of their
numbers pass through it. Here each becomes a constant in the form that the runtime reads: float32, or
`[outputs, inputs]` at 8 bits with a scale for each output, or at 4 bits in blocks (see `blocks.py`); adapters
in float16 if that is exact. Reshapes and transpositions of a matrix become the order in which it is stored.
All uses of a matrix, by any program and level, are of the same bytes: those of a level are the first.
"""

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.export.blocks import BLOCK, Blocks
from jaxllm.export.lookups import Subgraph, content_of
from jaxllm.export.quantized import channel_levels, channel_scales

Form = Literal["f32", "f16", "int8", "int4"]
# Prefix of the names of arguments that are matrices.
MATRIX = "matrix:"
# Numbers that are quantized at a time.
_CHUNK_NUMBERS = 1 << 18
_BITS: Mapping[Form, int] = {"f32": 32, "f16": 16, "int8": 8, "int4": 4}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A stored array as a matrix of rows of `width` numbers, or `turned` of columns, in a form."""

    stored: str
    width: int
    turned: bool = False
    form: Form = "f32"


@dataclasses.dataclass
class Part:
    """The first rows of a matrix, as tensors of a model.

    Attributes:
      rows, columns: of the part.
      buffer, scales_buffer: numbers of its buffers; -1 for none.
      facts: the quantization of its tensors.
    """

    rows: int
    columns: int
    buffer: int
    scales_buffer: int = -1
    facts: Any = None


class PlacedMatrices:
    """The matrices of a model.

    Args:
      arrays: the stored arrays, each read when it is written.
      form_of: the form of a stored array.
      scales: known scales of arrays at 8 bits, by name; those of others are found when they are written.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        form_of: Callable[[str], Form],
        scales: Mapping[str, np.ndarray],
    ) -> None:
        self._arrays, self._form_of, self._scales = arrays, form_of, scales
        self._parts: dict[Matrix, dict[int, Part]] = collections.defaultdict(dict)

    def place(self, schema: Any, model: Any, data: bytes) -> None:
        """Makes the arguments that are matrices constants of an unpacked model; `data` has its bytes."""
        for signature in model.signatureDefs:
            graph = model.subgraphs[signature.subgraphIndex]
            given = {int(each.tensorIndex): each.name.decode() for each in signature.inputs}
            found = {at: name for at, name in given.items() if name.startswith(MATRIX)}
            signature.inputs = [each for each in signature.inputs if int(each.tensorIndex) not in found]
            graph.inputs = [each for each in graph.inputs if int(each) not in found]
            _Graph(Subgraph(schema, model, graph, data), self).place(
                {at: name.removeprefix(MATRIX) for at, name in found.items()}
            )

    def part(self, own: Subgraph, matrix: Matrix, rows: int, columns: int) -> Part:
        """The first rows of a matrix in the form that its array has for products, or in float32."""
        parts, schema = self._parts[matrix], own.schema
        if rows in parts:
            return parts[rows]
        parts[rows] = part = Part(rows, columns, own.empty_buffer())
        if matrix.form in ("int8", "int4"):
            part.facts = schema.QuantizationParametersT()
        if matrix.form == "int8":
            known = self._scales.get(matrix.stored, ())
            count = 1 if len(known) == 1 else rows
            part.facts.scale, part.facts.zeroPoint = np.ones(count, np.float32), np.zeros(count, np.int64)
            part.facts.quantizedDimension = 0
            # The builder writes it once.
            part.facts.Pack = functools.cache(part.facts.Pack)
        elif matrix.form == "int4":
            part.scales_buffer = own.empty_buffer()
        return part

    def form(self, stored: str) -> Form:
        """The form of a stored array."""
        return self._form_of(stored)

    def layout(self, buffers: Any, end: int, align: int) -> int:
        """Sets offsets and sizes of all buffers, from the offset `end` of the file on; returns the end."""
        for matrix, parts in self._parts.items():
            for of_scales in (False, True) if matrix.form == "int4" else (False,):
                end += -end % align
                for part in parts.values():
                    buffer = buffers[part.scales_buffer if of_scales else part.buffer]
                    buffer.offset, buffer.size = end, _size(matrix, part, of_scales=of_scales)
                end += max(_size(matrix, part, of_scales=of_scales) for part in parts.values())
        return end

    def sizes(self) -> tuple[int, int]:
        """Bytes of all parts: stored separately, and shared."""
        sizes = [
            [_size(matrix, part) + _size(matrix, part, of_scales=True) for part in parts.values()]
            for matrix, parts in self._parts.items()
        ]
        return sum(map(sum, sizes)), sum(map(max, sizes))

    def write(self, file: BinaryIO, buffers: Any) -> None:
        """Writes all matrices to their places, one in memory at a time, and completes the model's scales."""
        of_array: dict[str, list[Matrix]] = collections.defaultdict(list)
        for matrix in self._parts:
            of_array[matrix.stored].append(matrix)
        for stored in self._arrays:
            if stored not in of_array:
                continue
            array = self._arrays[stored]
            for matrix in of_array[stored]:
                self._write(file, buffers, matrix, array)
            # Before the next one is read.
            del array

    def _write(self, file: BinaryIO, buffers: Any, matrix: Matrix, array: np.ndarray) -> None:
        parts = self._parts[matrix]
        largest = parts[max(parts)]
        at, scales, known = buffers[largest.buffer].offset, [], self._scales.get(matrix.stored)
        for first, rows in _chunks(matrix, array, largest.rows):
            if matrix.form == "int4":
                blocks = Blocks.of(rows)
                content = blocks.packed
                scales.append(blocks.scales)
            elif matrix.form == "int8":
                own = channel_scales(rows, 1)
                if known is not None:
                    own = known[first : first + len(rows), None] if len(known) > 1 else known[:, None]
                content = channel_levels(rows, own).astype(np.int8)
                scales.append(own.astype(np.float32))
            else:
                content = rows.astype(np.float16) if matrix.form == "f16" else rows
            file.seek(at)
            at += file.write(np.ascontiguousarray(content).view(np.uint8).data)
        if matrix.form == "int4":
            file.seek(buffers[largest.scales_buffer].offset)
            file.write(np.concatenate(scales).view(np.uint8).data)
        elif matrix.form == "int8":
            found = np.concatenate(scales).reshape(-1)
            for part in parts.values():
                part.facts.scale = found[: len(part.facts.scale)]


def bytes_of(numbers: int, outputs: int, form: Form) -> int:
    """Bytes of a matrix in a form, with its scales: 8-bit ones are written with zero points of 8 bytes."""
    scales = {"int8": 12 * outputs, "int4": numbers // BLOCK * 2}.get(form, 0)
    return numbers * _BITS[form] // 8 + scales


def _size(matrix: Matrix, part: Part, *, of_scales: bool = False) -> int:
    """Bytes of a part, or of the scales of its blocks."""
    numbers = part.rows * part.columns
    if of_scales:
        return numbers // BLOCK * 2 if matrix.form == "int4" else 0
    return numbers * _BITS[matrix.form] // 8


def _chunks(matrix: Matrix, array: np.ndarray, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a matrix in float32, some at a time, and the number of the first."""
    whole = array.reshape(-1, matrix.width)
    whole = whole.T if matrix.turned else whole
    step = max(1, _CHUNK_NUMBERS // whole.shape[1])
    for first in range(0, count, step):
        yield first, np.ascontiguousarray(whole[first : min(first + step, count)], np.float32)


class _Graph:
    """One subgraph of a model, whose matrices are placed."""

    def __init__(self, own: Subgraph, placed: PlacedMatrices) -> None:
        self.own, self.placed = own, placed
        self.made: dict[tuple[Matrix, tuple[int, ...]], int] = {}
        self.operators: list[Any] = []

    def place(self, found: Mapping[int, str]) -> None:
        """Makes tensors constants; `found`: by number, the names of their arrays."""
        own, kinds = self.own, self.own.kinds
        views = {at: Matrix(stored, own.shape(at)[-1]) for at, stored in found.items()}
        for operator in own.subgraph.operators:
            kind, inputs = own.kind(operator), [int(each) for each in operator.inputs]
            if not any(each in views for each in inputs):
                self.operators.append(operator)
                continue
            view, output = views.get(inputs[0]), int(operator.outputs[0])
            if view is not None and kind == kinds.RESHAPE and not view.turned:
                shape = own.shape(output)
                views[output] = dataclasses.replace(view, width=shape[-1])
                continue
            if view is not None and kind == kinds.TRANSPOSE and len(own.shape(output)) == 2:
                order = np.frombuffer(own.content(inputs[1]), np.int32)
                views[output] = dataclasses.replace(view, turned=view.turned != (order[0] == 1))
                continue
            product = kind in (kinds.FULLY_CONNECTED, kinds.BATCH_MATMUL) and inputs[1] in views
            if product and kind == kinds.BATCH_MATMUL and len(own.shape(inputs[1])) == 2:
                self._to_product(operator, views)
            table = view is not None and kind in (kinds.GATHER_ND, kinds.GATHER)
            # The one that the operator takes in other forms than float32.
            own_place = 1 if product else 0 if table else -1
            operator.inputs = [
                self._constant(views[each], own.shape(each), by_form=place == own_place)
                if each in views
                else each
                for place, each in enumerate(map(int, operator.inputs))
            ]
            self.operators.append(operator)
        own.subgraph.operators = self.operators

    def _to_product(self, operator: Any, views: dict[int, Matrix]) -> None:
        """Makes a product with a matrix `[inputs, outputs]` one with `[outputs, inputs]`, as constants are."""
        own, schema, options = self.own, self.own.schema, self.own.schema.FullyConnectedOptionsT()
        rows, weight = map(int, operator.inputs)
        if not operator.builtinOptions.adjY:
            turned = own.tensor(own.shape(weight)[::-1], schema.TensorType.FLOAT32)
            views[turned] = dataclasses.replace(views[weight], turned=not views[weight].turned)
            weight = turned
        options.keepNumDims = True
        operator.inputs = [rows, weight, -1]
        own.become(operator, own.kinds.FULLY_CONNECTED, schema.BuiltinOptions.FullyConnectedOptions, options)

    def _constant(self, view: Matrix, shape: list[int], *, by_form: bool) -> int:
        """The tensor of a matrix; in float32 unless `by_form`, where the operator takes other forms."""
        own, types = self.own, self.own.schema.TensorType
        form = self.placed.form(view.stored)
        matrix = dataclasses.replace(view, form=form if by_form or form == "f16" else "f32")
        key = matrix, tuple(shape)
        if key in self.made:
            return self.made[key]
        columns = shape[-1]
        part = self.placed.part(own, matrix, int(np.prod(shape, dtype=np.int64)) // columns, columns)
        kinds = {"f32": types.FLOAT32, "f16": types.FLOAT16, "int8": types.INT8, "int4": types.INT4}
        made = own.tensor(shape, kinds[matrix.form], part.buffer)
        own.subgraph.tensors[made].quantization = part.facts
        if matrix.form == "int4":
            facts = own.subgraph.tensors[made].quantization = copy.copy(part.facts)
            facts.detailsType = own.schema.QuantizationDetails.BlockwiseQuantization
            facts.details = own.schema.BlockwiseQuantizationT()
            facts.details.scales = own.tensor(
                [part.rows, columns // BLOCK], types.FLOAT16, part.scales_buffer
            )
            facts.details.zeroPoints, facts.details.blockSize = -1, BLOCK
        if matrix.form == "f16":
            wide = own.tensor(shape, types.FLOAT32)
            self.operators.append(own.widening(made, wide))
            made = wide
        self.made[key] = made
        return made
