"""A `.tflite` model as its file has it: which operators it runs, and buffers that share bytes.

Buffers lie behind the flatbuffer, each at a place and of a size (`Buffer.offset`, `Buffer.size` of the
schema), so that two may read the same bytes: what is equal is stored once, and so is the beginning of a
larger one, which is what a level's matrices are of the whole model's.
"""

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import xxhash

_IDENTIFIER = b"TFL3"
_ALIGN = 64
# Smaller buffers stay where they are: shapes, axes and the like.
_LEAST_SHARED_BYTES = 1024
_CUSTOM = 32


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator by name and by the types of its first two inputs and of its output."""

    name: str
    inputs: tuple[str, ...]
    output: str


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What buffers take, apart and as they are stored."""

    apart_bytes: int
    stored_bytes: int


def operators(data: bytes) -> dict[str, Counter[Operator]]:
    """The operators of each signature."""
    schema, model = _unpacked(data)
    names = {value: name for name, value in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
    types = {value: name for name, value in vars(schema.TensorType).items() if not name.startswith("_")}
    found = {}
    for signature in model.signatureDefs or []:
        graph, count = model.subgraphs[signature.subgraphIndex], Counter()
        for each in graph.operators:
            code = model.operatorCodes[each.opcodeIndex]
            number = max(code.builtinCode, code.deprecatedBuiltinCode)
            name = code.customCode.decode() if number == _CUSTOM else names[number]
            inputs = [types[graph.tensors[index].type] for index in list(each.inputs)[:2] if index >= 0]
            count[Operator(name, tuple(inputs), types[graph.tensors[each.outputs[0]].type])] += 1
        found[signature.signatureKey.decode()] = count
    return found


def share_buffers(data: bytes) -> tuple[bytes, Sharing]:
    """The model with every buffer's bytes stored once, also those that begin a larger buffer."""
    import flatbuffers

    schema, model = _unpacked(data)
    _dequantize_halves(schema, model, data)
    large: list[tuple[Any, memoryview]] = []
    for buffer in model.buffers:
        content = _content(buffer, data)
        if len(content) >= _LEAST_SHARED_BYTES:
            large.append((buffer, content))
    blobs: list[memoryview] = []
    begins: dict[tuple[int, bytes], int] = {}
    homes: list[int] = [0] * len(large)
    lengths = sorted({len(content) for _, content in large})
    # From the largest down: whatever begins a smaller buffer's home is there before it.
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

    def packed() -> bytes:
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    # Places are behind the flatbuffer, whose size does not depend on them.
    end = len(packed())
    places = []
    for blob in blobs:
        end += -end % _ALIGN
        places.append(end)
        end += len(blob)
    for (buffer, _), home in zip(large, homes, strict=True):
        buffer.offset = places[home]
    out = bytearray(packed())
    for place, blob in zip(places, blobs, strict=True):
        out += b"\0" * (place - len(out))
        out += blob
    return bytes(out), Sharing(sum(len(each) for _, each in large), sum(len(blob) for blob in blobs))


def _dequantize_halves(schema: Any, model: Any, data: bytes) -> None:
    """Makes casts of constants at half precision what XNNPACK knows them as: it widens them once, when it
    packs weights, and would run a cast in every step."""
    codes = [max(each.builtinCode, each.deprecatedBuiltinCode) for each in model.operatorCodes]
    dequantize = schema.OperatorCodeT()
    dequantize.builtinCode = dequantize.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    # Its version that takes halves.
    dequantize.version = 3
    for graph in model.subgraphs:
        for each in graph.operators:
            if codes[each.opcodeIndex] != schema.BuiltinOperator.CAST:
                continue
            source = graph.tensors[each.inputs[0]]
            constant = len(_content(model.buffers[source.buffer], data)) > 0
            if source.type != schema.TensorType.FLOAT16 or not constant:
                continue
            each.opcodeIndex, each.builtinOptions = len(codes), None
            each.builtinOptionsType = schema.BuiltinOptions.NONE
            if len(model.operatorCodes) == len(codes):
                model.operatorCodes.append(dequantize)


def _content(buffer: Any, data: bytes) -> memoryview:
    if buffer.size and buffer.offset > 1:
        return memoryview(data)[buffer.offset : buffer.offset + buffer.size]
    return memoryview(b"" if buffer.data is None else np.ascontiguousarray(buffer.data, np.uint8))


def _unpacked(data: bytes) -> tuple[Any, Any]:
    from ai_edge_litert import schema_py_generated as schema

    return schema, schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
