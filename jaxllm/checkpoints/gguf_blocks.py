"""Converts blocks of GGUF files to our weights: Q8_0 and Q4_0 bit for bit, floats exactly.

A block of 32 values has one float16 scale, as a group of our 8- and 4-bit weights does. Q6_K's blocks of 16
become 8-bit groups of 32. Blocks with a minimum (Q4_1, Q5_1, K-quants of 2 to 5 bits) have no such form: they
are widened, and quantized again where the caller asks for it.
"""

import numpy as np

from jaxllm.checkpoints.gguf_file import GgufTensor, import_gguf
from jaxllm.checkpoints.packed_weights import GROUP, Levels
from jaxllm.errors import CheckpointError
from jaxllm.quant.formats import QArray, quantize

# Types whose numbers fit 8-bit groups of 32 with little error; by name what the others lack.
INTO_INT8 = ("Q6_K", "Q5_0")
FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}
EXACT = {"Q8_0": 8, "Q4_0": 4}


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
    """A tensor of Q8_0 or Q4_0 as it is.

    Raises:
      CheckpointError: a scale is not finite, or a level is -128, which no quantizer writes.
    """
    bits = EXACT[tensor.kind]
    blocks = tensor.data.reshape(*tensor.shape[:-1], tensor.shape[-1] // GROUP, -1)
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


def into_int8(values: np.ndarray, axis: int) -> QArray:
    """Numbers as 8-bit weights in groups of 32."""
    return quantize(np.asarray(values, np.float32), bits=8, axis=axis, group=GROUP)
