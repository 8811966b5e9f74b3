"""Names the stages that a layer is cut into for two processors (mllm-NPU, arXiv 2407.05858, section 3.2).

A layer without a shadow has three stages, of which the integer processor runs two:

    project   norm, quantize, products of queries, keys and values
    attend    attention over the cache, in floats
    finish    product of what was attended to, the feed-forward block

A layer with a shadow is cut at every product, so that the float processor multiplies the excess (`shadow.py`)
while the integer processor multiplies the clipped activations; both results are added in the next stage:

    project        project_shadow     ->  attend (adds both; multiplies its own output's excess)
    widen                                 product of what was attended to, norm, first products of the block
    narrow         widen_shadow       ->  (adds both) activation, last product of the block
                   narrow_shadow          adds the excess of what the last product took
"""

from collections.abc import Mapping
from typing import Literal

Stage = Literal[
    "project",
    "attend",
    "finish",
    "project_shadow",
    "widen",
    "widen_shadow",
    "narrow",
    "narrow_shadow",
    "layer",
]
# In an order in which one processor can run them.
PLAIN_STAGES: tuple[Stage, ...] = ("project", "attend", "finish")
SHADOWED_STAGES: tuple[Stage, ...] = (
    "project", "project_shadow", "attend", "widen", "widen_shadow", "narrow", "narrow_shadow",
)  # fmt: skip
INTEGER_STAGES: frozenset[Stage] = frozenset(("project", "finish", "widen", "narrow"))
# Stage -> prefixes of the names of its parameters within the layer.
STAGE_PARAMETERS: Mapping[Stage, tuple[str, ...]] = {
    "project": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "project_shadow": ("attn_norm.", "attn.q", "attn.k", "attn.v"),
    "attend": ("attn.q_norm.", "attn.k_norm.", "attn.o"),
    "finish": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.", "ffn_post_norm."),
    "widen": ("attn.o", "attn_post_norm.", "ffn_norm.", "ffn.gate", "ffn.up"),
    "widen_shadow": ("ffn_norm.", "ffn.gate", "ffn.up"),
    "narrow": ("ffn.down",),
    "narrow_shadow": ("ffn.down", "ffn_post_norm."),
    "layer": ("",),
}


def stages_of(shadowed: bool) -> tuple[Stage, ...]:
    """The stages of a layer for two processors."""
    return SHADOWED_STAGES if shadowed else PLAIN_STAGES
