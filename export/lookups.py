"""Makes the look-ups of rows in a converted model ones that accelerators take.

The converter writes `GATHER_ND`, which they do not take. `GATHER` has one axis of numbers; of 8-bit rows
with a scale each, `EMBEDDING_LOOKUP` makes floats in one operation.
"""

from typing import Any

import numpy as np


def content_of(buffer: Any, data: bytes) -> memoryview:
    """The bytes of a buffer, in the flatbuffer or after it."""
    if buffer.size and buffer.offset > 1:
        return memoryview(data)[buffer.offset : buffer.offset + buffer.size]
    return memoryview(b"") if buffer.data is None else np.ascontiguousarray(buffer.data, np.uint8).data


def put_lookups(schema: Any, model: Any, data: bytes) -> None:
    """Replaces the look-ups of rows in all subgraphs of a model.

    Args:
      schema: the module of LiteRT's schema.
      model: the unpacked model, which is changed.
      data: its bytes, for constants.
    """
    for subgraph in model.subgraphs:
        Subgraph(schema, model, subgraph, data).put_lookups()


class Subgraph:
    """One subgraph of a model, being changed."""

    def __init__(self, schema: Any, model: Any, subgraph: Any, data: bytes) -> None:
        self.schema, self.model, self.subgraph, self.data = schema, model, subgraph, data
        self.kinds = schema.BuiltinOperator

    def put_lookups(self) -> None:
        """See the function."""
        operators: list[Any] = []
        for operator in self.subgraph.operators:
            if self.kind(operator) == self.kinds.GATHER_ND:
                matrix, numbers = map(int, operator.inputs)
                if self.shape(numbers)[1:] == [1]:
                    line = self.tensor(self.shape(numbers)[:1], self.schema.TensorType.INT32)
                    operators.append(self.reshape(numbers, line))
                    operator.inputs = [matrix, line]
                    options = self.schema.GatherOptionsT()
                    self.become(
                        operator, self.kinds.GATHER, self.schema.BuiltinOptions.GatherOptions, options
                    )
                    if self.subgraph.tensors[matrix].quantization is not None:
                        operator.inputs = [line, matrix]
                        self.become(operator, self.kinds.EMBEDDING_LOOKUP, 0, None)
            operators.append(operator)
        self.subgraph.operators = operators
        read, kept = {int(tensor) for tensor in self.subgraph.outputs}, []
        for operator in reversed(self.subgraph.operators):
            if read & {int(tensor) for tensor in operator.outputs}:
                kept.append(operator)
                read |= {int(tensor) for tensor in operator.inputs}
        self.subgraph.operators = kept[::-1]

    def kind(self, operator: Any) -> int:
        """The operator's kind."""
        return self.model.operatorCodes[operator.opcodeIndex].builtinCode

    def shape(self, tensor: int) -> list[int]:
        """The shape of a tensor."""
        return [int(each) for each in self.subgraph.tensors[tensor].shape]

    def content(self, tensor: int) -> memoryview:
        """The bytes of a constant."""
        return content_of(self.model.buffers[self.subgraph.tensors[tensor].buffer], self.data)

    def become(self, operator: Any, kind: int, options_type: int, options: Any) -> None:
        """Makes an operator one of another kind."""
        codes = self.model.operatorCodes
        if kind not in [each.builtinCode for each in codes]:
            code = self.schema.OperatorCodeT()
            code.builtinCode = code.deprecatedBuiltinCode = kind
            codes.append(code)
        operator.opcodeIndex = [each.builtinCode for each in codes].index(kind)
        operator.builtinOptionsType, operator.builtinOptions = options_type, options

    def tensor(self, shape: list[int], dtype: int, buffer: int = 0) -> int:
        """A new tensor, a constant of a buffer."""
        made = self.schema.TensorT()
        made.shape, made.type, made.buffer = shape, dtype, buffer
        self.subgraph.tensors.append(made)
        return len(self.subgraph.tensors) - 1

    def empty_buffer(self) -> int:
        """A new buffer without bytes."""
        self.model.buffers.append(self.schema.BufferT())
        return len(self.model.buffers) - 1

    def buffer(self, values: np.ndarray) -> int:
        """A new buffer."""
        made = self.empty_buffer()
        self.model.buffers[made].data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return made

    def reshape(self, source: int, target: int) -> Any:
        """A new operator that gives one tensor the shape of another."""
        shape = np.array(self.shape(target), np.int32)
        operator, options = self.schema.OperatorT(), self.schema.ReshapeOptionsT()
        given = self.tensor([len(shape)], self.schema.TensorType.INT32, self.buffer(shape))
        operator.inputs, operator.outputs = [source, given], [target]
        options.newShape = shape.tolist()
        self.become(operator, self.kinds.RESHAPE, self.schema.BuiltinOptions.ReshapeOptions, options)
        return operator
