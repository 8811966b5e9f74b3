"""Names the formats of stored weights, the first bytes of GGUF files, and the sources of models; imports
nothing, so that command lines can list them."""

from typing import Literal

# int8-nested is int8 in two planes of 4 bits; the first is a 4-bit model for self-drafting. int4 has a
# minimum for each group, like Q4_1, Q4_K, and asymmetric AWQ and GPTQ (5 bits per weight), and keeps at 8
# bits what costs most at 4: embedding, head, keys and values. int4-all has 4 bits without minima everywhere:
# smaller, faster, less exact.
WeightFormat = Literal["f32", "bf16", "int8", "int8-nested", "int4", "int4-all"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("f32", "bf16", "int8", "int8-nested", "int4", "int4-all")
# Chosen from `WEIGHT_FORMATS` by bytes and loss (`jaxllm/weight_choice.py`).
AUTO: Literal["auto"] = "auto"
WeightChoice = WeightFormat | Literal["auto"]
GGUF_MAGIC = b"GGUF"
# Begin the names of models that are not paths: of an installed Python package, and of the hub.
PACKAGE, HUB = "package:", "hf:"
# Allowed bitwidths of experts: 2, 4 and 8 quantized, 16 for bfloat16, 32 for float32.
EXPERT_BITS = (2, 4, 8, 16, 32)
