"""Storage of weights: widths (`formats`), the native kernels' order (`blocks`), types of weights (`weights`),
parts of weights and dequantization (`parts`). Products are in `jaxllm/nn/linear.py`."""

from jaxllm.quant.blocks import PANEL, BlockedArray, blocked_shapes, from_blocks, nested_blocks, to_blocks
from jaxllm.quant.formats import BITS, GROUPS, Bits, QArray, quantize
from jaxllm.quant.parts import (
    by_form,
    contracted_rows,
    dequantize,
    embedding_rows,
    entry_of_form,
    first_units,
    narrow,
    sliced,
    take_units,
    unit_at,
)
from jaxllm.quant.weights import (
    Adapted,
    Apart,
    Bfloat16Bits,
    ByForm,
    OwnProduct,
    Prefix,
    Weight,
)

__all__ = [
    "BITS",
    "GROUPS",
    "PANEL",
    "Adapted",
    "Apart",
    "Bfloat16Bits",
    "Bits",
    "BlockedArray",
    "ByForm",
    "OwnProduct",
    "Prefix",
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
    "nested_blocks",
    "quantize",
    "sliced",
    "take_units",
    "to_blocks",
    "unit_at",
]
