"""Converts blocks of GGUF files to our weights: Q8_0, Q4_0, Q4_1 and MXFP4 bit for bit, floats exactly.

A block of 32 values has one float16 scale, as a group of our 8- and 4-bit weights does, and that of Q4_1 a
minimum. A scale of MXFP4 is a power of two, and its numbers are halves of whole ones, which have 8 bits. Q4_K
has scales and minima as products of a float16 and 6 bits, which are rounded to float16. Other blocks (5 and 6
bits) become 8-bit groups of 32. Those of 2 and 3 bits are widened, and quantized again where the caller asks
for it.
"""

import numpy as np

from jaxllm.checkpoints.gguf_file import GgufTensor, import_gguf
from jaxllm.checkpoints.packed_weights import GROUP, Levels, e2m1_levels
from jaxllm.errors import CheckpointError
from jaxllm.quant.formats import QArray, quantize

# Types whose numbers fit 8-bit groups of 32 with little error.
INTO_INT8 = ("Q6_K", "Q5_0", "Q5_1", "Q5_K")
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}
EXACT = {"Q8_0": 8, "MXFP4": 8, "Q4_0": 4}
MINIMA = ("Q4_1", "Q4_K")


def floats(tensor: GgufTensor) -> np.ndarray:
    """A tensor's numbers: float16 and bfloat16 as they are, all others as float32.

    Raises:
      CheckpointError: its blocks cannot be widened.
    """
    if tensor.kind == "BF16":
        import ml_dtypes

        return tensor.data.view(ml_dtypes.bfloat16).reshape(tensor.shape)
    if tensor.kind in FLOATS:
        return tensor.data.view(FLOATS[tensor.kind]).reshape(tensor.shape)
    gguf = import_gguf()
    kind = gguf.GGMLQuantizationType[tensor.kind]
    try:
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(tensor.data, kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"blocks of {tensor.kind} cannot be read; take a file of Q8_0, Q6_K or Q4_0"
        ) from error
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def levels(tensor: GgufTensor) -> Levels:
    """A tensor of Q8_0, MXFP4 or Q4_0 as it is.

    Raises:
      CheckpointError: a scale is not finite, or above what float16 holds, or a level is -128, which no
        quantizer writes.
    """
    bits = EXACT[tensor.kind]
    blocks = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // GROUP, -1)
    if tensor.kind == "MXFP4":
        nibbles = blocks[..., 1:]
        return e2m1_levels(np.concatenate([nibbles & 15, nibbles >> 4], axis=-1), blocks[..., 0])
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    if bits == 8:
        found = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    else:
        # Low nibbles are the block's first half, high ones its second.
        nibbles = blocks[..., 2:]
        found = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int8) - np.int8(8)
    if not np.isfinite(scale).all():
        raise CheckpointError("a scale is not finite; download the file again")
    if bits == 8 and (found == -128).any():
        raise CheckpointError("a level is -128, which quantizers do not write; download the file again")
    return Levels(found.reshape(tensor.shape), scale, bits)


def levels_with_minima(tensor: GgufTensor) -> Levels:
    """A tensor of Q4_1 or Q4_K as 4-bit levels above minima.

    Raises:
      CheckpointError: a scale or minimum is not finite, or above what float16 holds.
    """
    shape = (*tensor.shape[:-1], tensor.shape[-1] // GROUP)
    if tensor.kind == "Q4_1":
        blocks = tensor.data.reshape(*shape, -1)
        scale, minimum = np.moveaxis(np.ascontiguousarray(blocks[..., :4]).view("<f2"), -1, 0)
        nibbles = blocks[..., 4:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    else:
        # Of 8 groups a scale and a minimum in float16, 6 bits of each for every group, then by pairs of
        # groups 32 bytes, low nibbles first.
        blocks = tensor.data.reshape(-1, 144)
        both = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32)
        factors = np.stack(import_gguf().quants.Q4_K.get_scale_min(blocks[:, 4:16])).astype(np.float32)
        with np.errstate(over="ignore"):
            scale = (both[:, :1] * factors[0]).astype(np.float16).reshape(shape)
            minimum = (-both[:, 1:] * factors[1]).astype(np.float16).reshape(shape)
        nibbles = blocks[:, 16:].reshape(-1, 4, 32)
        codes = np.stack([nibbles & 15, nibbles >> 4], axis=2)
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise CheckpointError("a scale is not finite in float16; download the file again, or choose int8")
    return Levels(codes.astype(np.int8).reshape(tensor.shape) - np.int8(8), scale, 4, minimum=minimum)


def into_int8(values: np.ndarray, axis: int) -> QArray:
    """Numbers as 8-bit weights in groups of 32."""
    return quantize(np.asarray(values, np.float32), bits=8, axis=axis, group=GROUP)
