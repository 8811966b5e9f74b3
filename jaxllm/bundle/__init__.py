"""A prepared model in one file: aligned weights, tokenizer, manifest; atomic, versioned, checksummed.

    header    64 bytes: magic, version, place and SHA-256 of the manifest
    segments  page-aligned: "tokenizer", "embed", "layers.0", "layers.1", ..., "final", parts;
              behind a layer "layers.0.experts.0", ... where each expert is stored by itself
    manifest  JSON at the end: config, segments with checksums, tensors with places

Weights lie layer by layer in the order in which a step reads them, each tensor at a multiple of 64
bytes, so that opening maps the file and copies nothing, and a reader can stream one layer with few
large aligned reads. The manifest is last because a writer knows the checksums only then.

Opening checks the manifest whole (its SHA-256, every place, shape and dtype against the config); the
bytes of a segment are checked when it is first read. Nothing in a file can make a reader allocate
more than the file's own size, or run code.
"""

from jaxllm.bundle.apart import expert_widths, lay_experts_apart
from jaxllm.bundle.layout import SUFFIX, WEIGHT_FORMATS, Part, Segment, Tensor, WeightFormat, segment_of
from jaxllm.bundle.reader import Bundle
from jaxllm.bundle.writer import EXPERT_BITS, rewrite_bundle, write_bundle

__all__ = [
    "EXPERT_BITS",
    "SUFFIX",
    "WEIGHT_FORMATS",
    "Bundle",
    "Part",
    "Segment",
    "Tensor",
    "WeightFormat",
    "expert_widths",
    "lay_experts_apart",
    "rewrite_bundle",
    "segment_of",
    "write_bundle",
]
