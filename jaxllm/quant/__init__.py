"""How weights are stored: their widths (`formats`), the native kernels' order (`blocks`), and reading them
(`weights`). Products are in `linear.py`."""

from jaxllm.quant.blocks import PANEL, BlockedArray, blocked_shapes, from_blocks, to_blocks
from jaxllm.quant.formats import GROUPS, INT4_GROUP, QArray, pack_int4, packed_columns, quantize
from jaxllm.quant.weights import (
    Adapted,
    AdaptedFromBuffer,
    Bfloat16Bits,
    FirstUnits,
    Narrowed,
    Weight,
    dequantize,
    embedding_rows,
    first_units,
    narrow,
    sliced,
    take_units,
    unit_at,
    unpack_int4,
)

__all__ = [
    "GROUPS",
    "INT4_GROUP",
    "PANEL",
    "Adapted",
    "AdaptedFromBuffer",
    "Bfloat16Bits",
    "BlockedArray",
    "FirstUnits",
    "Narrowed",
    "QArray",
    "Weight",
    "blocked_shapes",
    "dequantize",
    "embedding_rows",
    "first_units",
    "from_blocks",
    "narrow",
    "pack_int4",
    "packed_columns",
    "quantize",
    "sliced",
    "take_units",
    "to_blocks",
    "unit_at",
    "unpack_int4",
]
