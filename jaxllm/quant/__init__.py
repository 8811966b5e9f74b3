"""How weights are stored: their widths (`formats`), the native kernels' order (`blocks`), what else a weight
may be (`weights`), parts of it (`parts`) and reading it (`reading`). Products are in `linear.py`."""

from jaxllm.quant.blocks import PANEL, BlockedArray, blocked_shapes, from_blocks, to_blocks
from jaxllm.quant.formats import (
    BITS,
    GROUPS,
    INT4_GROUP,
    Bits,
    QArray,
    pack_int2,
    pack_int4,
    packed_columns,
    quantize,
)
from jaxllm.quant.parts import by_form, entry_of_form, first_units, narrow, sliced, take_units, unit_at
from jaxllm.quant.reading import contracted_rows, dequantize, embedding_rows, unpack_int2, unpack_int4
from jaxllm.quant.weights import (
    Adapted,
    AdaptedFromBuffer,
    Apart,
    Bfloat16Bits,
    ByForm,
    FirstUnits,
    Narrowed,
    OwnProduct,
    Weight,
)

__all__ = [
    "BITS",
    "GROUPS",
    "INT4_GROUP",
    "PANEL",
    "Adapted",
    "AdaptedFromBuffer",
    "Apart",
    "Bfloat16Bits",
    "Bits",
    "BlockedArray",
    "ByForm",
    "FirstUnits",
    "Narrowed",
    "OwnProduct",
    "QArray",
    "Weight",
    "blocked_shapes",
    "by_form",
    "contracted_rows",
    "dequantize",
    "embedding_rows",
    "entry_of_form",
    "first_units",
    "from_blocks",
    "narrow",
    "pack_int2",
    "pack_int4",
    "packed_columns",
    "quantize",
    "sliced",
    "take_units",
    "to_blocks",
    "unit_at",
    "unpack_int2",
    "unpack_int4",
]
