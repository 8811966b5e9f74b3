"""Storage of weights: widths (`formats`), the native kernels' order (`blocks`), types of weights (`weights`),
parts of weights and dequantization (`parts`). Products are in `jaxllm/nn/linear.py`."""

from jaxllm.quant.blocks import PANEL as PANEL
from jaxllm.quant.blocks import BlockedArray as BlockedArray
from jaxllm.quant.blocks import blocked_shapes as blocked_shapes
from jaxllm.quant.blocks import from_blocks as from_blocks
from jaxllm.quant.blocks import nested_blocks as nested_blocks
from jaxllm.quant.blocks import to_blocks as to_blocks
from jaxllm.quant.formats import BITS as BITS
from jaxllm.quant.formats import GROUPS as GROUPS
from jaxllm.quant.formats import Bits as Bits
from jaxllm.quant.formats import QArray as QArray
from jaxllm.quant.formats import quantize as quantize
from jaxllm.quant.parts import as_floats as as_floats
from jaxllm.quant.parts import by_form as by_form
from jaxllm.quant.parts import contracted_rows as contracted_rows
from jaxllm.quant.parts import dequantize as dequantize
from jaxllm.quant.parts import embedding_rows as embedding_rows
from jaxllm.quant.parts import entry_of_form as entry_of_form
from jaxllm.quant.parts import first_units as first_units
from jaxllm.quant.parts import narrow as narrow
from jaxllm.quant.parts import sliced as sliced
from jaxllm.quant.parts import take_units as take_units
from jaxllm.quant.parts import unit_at as unit_at
from jaxllm.quant.weights import Adapted as Adapted
from jaxllm.quant.weights import Bfloat16Bits as Bfloat16Bits
from jaxllm.quant.weights import ByForm as ByForm
from jaxllm.quant.weights import OwnProduct as OwnProduct
from jaxllm.quant.weights import PerExpert as PerExpert
from jaxllm.quant.weights import Prefix as Prefix
from jaxllm.quant.weights import Weight as Weight
