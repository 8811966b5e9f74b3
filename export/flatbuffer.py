"""Rewrites a `.tflite` file with shared buffers and scales, and weights at half precision.

Buffers are stored after the flatbuffer, each with an offset and a size (`Buffer.offset`, `Buffer.size` of
the schema), so that two may refer to the same bytes: equal buffers are stored once, and so is a buffer that
is a prefix of a larger one, as a level's matrices are of the whole model's. Scales and zero points of
channels are repeated with every use of a matrix: equal vectors of them are written once.
"""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

_IDENTIFIER = b"TFL3"
_ALIGN = 64
# Smaller buffers, such as shapes and axes, stay in the flatbuffer.
_LEAST_SHARED_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Bytes of all buffers: stored separately, and shared."""

    apart_bytes: int
    stored_bytes: int


def share_buffers(data: bytes, halves: Sequence[np.ndarray] = ()) -> tuple[bytes, Sharing]:
    """Returns the model with the bytes of equal buffers, and of prefixes of larger ones, stored once.

    Args:
      data: bytes of the model.
      halves: float16 matrices (or stacks, flattened to matrices); constants of the model that equal one of
        them in float32, transposed or not, are stored as float16.
    """
    import flatbuffers

    schema, model = _unpacked(data)
    if halves:
        _put_halves(schema, model, data, halves)
    large: list[tuple[Any, memoryview]] = []
    for buffer in model.buffers:
        content = _content(buffer, data)
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
    _share_scales(model)

    def packed() -> bytes:
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    # Offsets are after the flatbuffer, whose size does not depend on them.
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


def _share_scales(model: Any) -> None:
    """Makes equal vectors of scales and zero points one object, which the builder writes once."""
    found: dict[tuple[Any, ...], Any] = {}
    for subgraph in model.subgraphs:
        for tensor in subgraph.tensors:
            if tensor.quantization is None:
                continue
            facts = sorted(vars(tensor.quantization).items())
            key = tuple(each.tobytes() if isinstance(each, np.ndarray) else repr(each) for _, each in facts)
            if key not in found:
                found[key] = tensor.quantization
                found[key].Pack = functools.cache(found[key].Pack)
            tensor.quantization = found[key]


def _put_halves(schema: Any, model: Any, data: bytes, halves: Sequence[np.ndarray]) -> None:
    """Stores constants that equal one of `halves` at half precision, each followed by a dequantize
    operator, which XNNPACK runs once, when it packs weights."""
    wide = [each.reshape(len(each), -1).astype(np.float32) for each in halves]
    layouts = [*wide, *(each.T for each in wide)]
    known = {xxhash.xxh3_128_digest(np.ascontiguousarray(each).data) for each in layouts}
    dequantize = schema.OperatorCodeT()
    dequantize.builtinCode = dequantize.deprecatedBuiltinCode = schema.BuiltinOperator.DEQUANTIZE
    # The operator's version that accepts float16.
    dequantize.version = 3
    model.operatorCodes.append(dequantize)
    replaced = set()
    for subgraph in model.subgraphs:
        added = []
        for index, tensor in enumerate(list(subgraph.tensors)):
            content = _content(model.buffers[tensor.buffer], data)
            if tensor.type != schema.TensorType.FLOAT32 or xxhash.xxh3_128_digest(content) not in known:
                continue
            buffer, source, operator = schema.BufferT(), copy.copy(tensor), schema.OperatorT()
            buffer.data = np.frombuffer(content, np.float32).astype(np.float16).view(np.uint8)
            source.type, source.buffer = schema.TensorType.FLOAT16, len(model.buffers)
            operator.opcodeIndex, operator.inputs = len(model.operatorCodes) - 1, [len(subgraph.tensors)]
            operator.outputs = [index]
            model.buffers.append(buffer)
            subgraph.tensors.append(source)
            added.append(operator)
            replaced.add(tensor.buffer)
            # Buffer 0 is that of tensors that are no constants.
            tensor.buffer = 0
        subgraph.operators[:0] = added
    for index in replaced:
        model.buffers[index] = schema.BufferT()


def _content(buffer: Any, data: bytes) -> memoryview:
    if buffer.size and buffer.offset > 1:
        return memoryview(data)[buffer.offset : buffer.offset + buffer.size]
    return memoryview(b"") if buffer.data is None else np.ascontiguousarray(buffer.data, np.uint8).data


def _unpacked(data: bytes) -> tuple[Any, Any]:
    from ai_edge_litert import schema_py_generated as schema

    return schema, schema.ModelT.InitFromObj(schema.Model.GetRootAs(data, 0))
