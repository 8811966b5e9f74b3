"""Places the matrices of a bundle in a converted model, and writes them after its flatbuffer one at a time.

The converter gets a program with its matrices as arguments (see `converter.py`), so that none of their
numbers pass through it. Here each becomes a constant in the form that the runtime reads: float32, or
`[outputs, inputs]` at 8 bits with a scale for each output, or at 4 bits in blocks (see `blocks.py`). Reshapes
and transpositions become the order in which it is stored. All uses of a matrix, by any program and level, are
of the same bytes: those of a level are the first.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from jaxllm.export.blocks import BLOCK, Blocks, in_blocks
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.folder_format.parts import Argument
from jaxllm.export.lookups import Subgraph
from jaxllm.export.quantized import ROWS, channel_levels, channel_scales, quantized_adapters
from jaxllm.export.subject import Arrays, Subject, shapes_of
from jaxllm.models.parameters import param_specs

Form = Literal["f32", "f16", "int8", "int4"]
# Prefix of the names of arguments that are matrices.
MATRIX = "matrix:"
# Numbers that are quantized at a time.
_CHUNK_NUMBERS = 1 << 18
_BITS: Mapping[Form, int] = {"f32": 32, "f16": 16, "int8": 8, "int4": 4}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A stored array as a matrix with rows of `width` numbers, or that one `turned`, in a form."""

    stored: str
    width: int
    turned: bool = False
    form: Form = "f32"


@dataclasses.dataclass
class Part:
    """The first rows of a matrix: numbers of its buffers, one for a scale of each block, and quantization."""

    size_bytes: int
    buffers: list[int]
    facts: Any = None


def described_weights(
    subject: Subject, level: int, arrays: Container[str] = ()
) -> dict[str, np.ndarray | Argument]:
    """The weights of a level's programs: matrices as descriptions, vectors and `arrays` as arrays."""
    entry, weights = subject.levels[level], subject.weights(level)
    vectors = {name for name, spec in param_specs(entry.cfg).items() if spec.role == "vector"}
    return {
        name: weights[name] if name in vectors or name in arrays else each
        for name, each in entry.weights.items()
    }


def forms_of(subject: Subject, precision: Precision) -> dict[str, Form]:
    """The form of each stored array. Rows of a shadow stay floats; w8a8 is as int8."""
    blocks, found = in_blocks(subject.cfg) if precision == "int4" else set[str](), dict[str, Form]()
    for name, each in shapes_of(subject.arrays).items():
        floats: Form = "f16" if each.dtype == np.float16 else "f32"
        integers: Form = "int4" if name in blocks else "int8"
        found[name] = floats if precision == "f32" or name.endswith(ROWS) else integers
    return found


def bytes_of(numbers: int, outputs: int, form: Form) -> int:
    """Bytes of a matrix in a form, with its scales and, at 8 bits, zero points."""
    return numbers * _BITS[form] // 8 + {"int8": 12 * outputs, "int4": numbers // 16}.get(form, 0)


def as_stored(subject: Subject, precision: Precision) -> Subject:
    """The subject with its matrices as a runtime reads them at 8 or 4 bits, in float32: rounded when they are
    read."""
    forms, specs = forms_of(subject, precision), param_specs(subject.cfg)
    adapters, _ = quantized_adapters(subject)

    def read(name: str) -> np.ndarray:
        if name in adapters:
            return adapters[name]
        array = subject.arrays[name]
        if name not in specs or specs[name].role == "vector":
            return array
        turned = specs[name].role == "from_units"
        made = np.empty(array.shape, np.float32)
        whole, out = (each.reshape(-1, each.shape[-1]) for each in (array, made))
        whole, out = (whole.T, out.T) if turned else (whole, out)
        for rows, place in _in_chunks(whole):
            if forms[name] == "int4":
                out[place] = Blocks.of(rows).values
            else:
                scale = channel_scales(rows, 1)
                out[place] = channel_levels(rows, scale) * scale
        return made

    return dataclasses.replace(subject, arrays=Arrays(shapes_of(subject.arrays), read))


class PlacedMatrices:
    """The matrices of a subject, at a precision, in one model."""

    def __init__(self, subject: Subject, precision: Precision) -> None:
        adapters, self._scales = ({}, {}) if precision == "f32" else quantized_adapters(subject)
        self._arrays: Mapping[str, np.ndarray] = collections.ChainMap(adapters, subject.arrays)  # pyright: ignore
        self._forms = forms_of(subject, precision)
        # By matrix, and by the shape `[rows, columns]` of a part.
        self._parts: dict[Matrix, dict[tuple[int, int], Part]] = collections.defaultdict(dict)

    def place(self, schema: Any, model: Any, data: bytes) -> None:
        """Makes the arguments that are matrices constants of an unpacked model; `data` has its bytes."""
        for signature in model.signatureDefs:
            subgraph = model.subgraphs[signature.subgraphIndex]
            given = {int(each.tensorIndex): each.name.decode() for each in signature.inputs}
            found = {at: name for at, name in given.items() if name.startswith(MATRIX)}
            signature.inputs = [each for each in signature.inputs if int(each.tensorIndex) not in found]
            subgraph.inputs = [each for each in subgraph.inputs if int(each) not in found]
            names = {at: name.removeprefix(MATRIX) for at, name in found.items()}
            self._place(Subgraph(schema, model, subgraph, data), names)

    def _place(self, own: Subgraph, found: Mapping[int, str]) -> None:
        """Places the arrays of a subgraph, whose names `found` has by tensor."""
        kinds, operators, made = own.kinds, list[Any](), dict[Any, int]()
        views = {at: Matrix(stored, own.shape(at)[-1]) for at, stored in found.items()}
        for operator in own.subgraph.operators:
            kind, inputs, output = own.kind(operator), [*map(int, operator.inputs)], int(operator.outputs[0])
            view = views.get(inputs[0])
            if view is not None and kind == kinds.RESHAPE and not view.turned:
                views[output] = dataclasses.replace(view, width=own.shape(output)[-1])
                continue
            if view is not None and kind == kinds.TRANSPOSE and len(own.shape(output)) == 2:
                order = np.frombuffer(own.content(inputs[1]), np.int32)
                views[output] = dataclasses.replace(view, turned=view.turned != (order[0] == 1))
                continue
            if kind == kinds.BATCH_MATMUL and inputs[1] in views and len(own.shape(inputs[1])) == 2:
                inputs, kind = self._to_product(own, operator, views), kinds.FULLY_CONNECTED
            # The input that may have another form than float32.
            place = {kinds.FULLY_CONNECTED: 1, kinds.GATHER_ND: 0, kinds.GATHER: 0}.get(kind, -1)
            for index, each in enumerate(inputs):
                if each in views:
                    form = self._forms[views[each].stored]
                    matrix = dataclasses.replace(views[each], form=form if index == place else "f32")
                    key = matrix, *own.shape(each)
                    if key not in made:
                        made[key] = self._constant(own, matrix, own.shape(each), operators)
                    inputs[index] = made[key]
            operator.inputs = inputs
            operators.append(operator)
        own.subgraph.operators = operators

    def _to_product(self, own: Subgraph, operator: Any, views: dict[int, Matrix]) -> list[int]:
        """Makes a product with a matrix `[inputs, outputs]` one with `[outputs, inputs]`; its inputs."""
        rows, weight = map(int, operator.inputs)
        assert not operator.builtinOptions.adjX
        if not operator.builtinOptions.adjY:
            turned = dataclasses.replace(views[weight], turned=not views[weight].turned)
            weight = own.tensor(own.shape(weight)[::-1], own.schema.TensorType.FLOAT32)
            views[weight] = turned
        options = own.schema.FullyConnectedOptionsT()
        options.keepNumDims = True
        kind = own.schema.BuiltinOptions.FullyConnectedOptions
        own.become(operator, own.kinds.FULLY_CONNECTED, kind, options)
        return [rows, weight, -1]

    def _constant(self, own: Subgraph, matrix: Matrix, shape: list[int], operators: list[Any]) -> int:
        """A new tensor of a matrix; in float16 one that a new operator widens, once, when XNNPACK packs."""
        schema, types, columns = own.schema, own.schema.TensorType, shape[-1]
        rows = math.prod(shape) // columns
        if (part := self._parts[matrix].get((rows, columns))) is None:
            buffers = [own.empty_buffer() for _ in range(2 if matrix.form == "int4" else 1)]
            part = Part(rows * columns * _BITS[matrix.form] // 8, buffers)
            self._parts[matrix][rows, columns] = part
            if matrix.form == "int8":
                count = 1 if len(self._scales.get(matrix.stored, ())) == 1 else rows
                part.facts = schema.QuantizationParametersT()
                part.facts.scale, part.facts.zeroPoint = np.ones(count, np.float32), np.zeros(count, np.int64)
                # The builder writes it once.
                part.facts.Pack = functools.cache(part.facts.Pack)
        kinds = {"f32": types.FLOAT32, "f16": types.FLOAT16, "int8": types.INT8, "int4": types.INT4}
        made = own.tensor(shape, kinds[matrix.form], part.buffers[0])
        own.subgraph.tensors[made].quantization = part.facts
        if matrix.form == "int4":
            facts = own.subgraph.tensors[made].quantization = schema.QuantizationParametersT()
            facts.detailsType = schema.QuantizationDetails.BlockwiseQuantization
            facts.details = schema.BlockwiseQuantizationT()
            facts.details.scales = own.tensor([rows, columns // BLOCK], types.FLOAT16, part.buffers[1])
            facts.details.zeroPoints, facts.details.blockSize = -1, BLOCK
        if matrix.form != "f16":
            return made
        operator, wide = schema.OperatorT(), own.tensor(shape, types.FLOAT32)
        operator.inputs, operator.outputs = [made], [wide]
        own.become(operator, own.kinds.DEQUANTIZE, 0, None)
        # The operator's version that accepts float16.
        own.model.operatorCodes[operator.opcodeIndex].version = 3
        operators.append(operator)
        return wide

    def layout(self, buffers: Any, end: int, align: int) -> int:
        """Sets offsets and sizes of all buffers, from an offset of the file on, and returns the end."""
        for parts in self._parts.values():
            for place in range(max(len(each.buffers) for each in parts.values())):
                end += -end % align
                for part in parts.values():
                    buffer = buffers[part.buffers[place]]
                    # Of a block the scale has 2 bytes, its levels have 16.
                    buffer.offset, buffer.size = end, part.size_bytes // (8 if place else 1)
                end += max(buffers[part.buffers[place]].size for part in parts.values())
        return end

    def write(self, file: BinaryIO, buffers: Any) -> None:
        """Writes all matrices to their places, one in memory at a time, and completes the model's scales."""
        for stored in self._arrays:
            own = [matrix for matrix in self._parts if matrix.stored == stored]
            array = self._arrays[stored] if own else None
            for matrix in own:
                self._write(file, buffers, matrix, array)
            # Before the next one is read.
            del array

    def _write(self, file: BinaryIO, buffers: Any, matrix: Matrix, array: Any) -> None:
        parts = self._parts[matrix]
        (count, _), largest = max(parts.items())
        whole = array.reshape(-1, matrix.width)
        whole = whole.T if matrix.turned else whole
        at, scales = buffers[largest.buffers[0]].offset, []
        known = self._scales.get(matrix.stored)
        for rows, place in _in_chunks(whole[:count]):
            content = rows.astype(np.float16) if matrix.form == "f16" else rows
            if matrix.form == "int4":
                blocks = Blocks.of(rows)
                content = blocks.packed
                scales.append(blocks.scales)
            elif matrix.form == "int8":
                own = channel_scales(rows, 1)
                if known is not None:
                    own = known[place, None] if len(known) > 1 else known[:, None]
                content = channel_levels(rows, own).astype(np.int8)
                scales.append(own.astype(np.float32).reshape(-1))
            file.seek(at)
            at += file.write(content.view(np.uint8).data)
        if matrix.form == "int4":
            file.seek(buffers[largest.buffers[1]].offset)
            file.write(np.concatenate(scales).view(np.uint8).data)
        for part in parts.values() if matrix.form == "int8" else ():
            part.facts.scale = np.concatenate(scales)[: len(part.facts.scale)]


def _in_chunks(matrix: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
    """Some rows of a matrix at a time, in float32, and where they are: rounding holds several copies."""
    step = max(1, _CHUNK_NUMBERS // matrix.shape[-1])
    for first in range(0, len(matrix), step):
        place = slice(first, min(first + step, len(matrix)))
        yield np.ascontiguousarray(matrix[place], np.float32), place
