"""Reads and writes bundles: a prepared model in one file, aligned, atomic, versioned, checksummed.

    header    64 bytes: magic, version, offset, length and SHA-256 of the manifest
    segments  page-aligned: "tokenizer", "embed", "layers.0", "layers.1", ..., "final", parts;
              after a layer "layers.0.experts.0", ... if experts are stored separately
    manifest  JSON at the end: config, segments with checksums, tensors with offsets

Weights are stored layer by layer in the order of a forward pass, each tensor at a multiple of 64 bytes,
so that opening maps the file without a copy, and a layer can be streamed with few large aligned reads.
The manifest is last because the writer knows the checksums only then.

Opening checks the whole manifest (its SHA-256; every offset, shape and dtype against the config); the
bytes of a segment are checked when it is first read. No file can make a reader allocate more than the
file's own size, or run code.
"""

from typing import TYPE_CHECKING, Any

from jaxllm.bundle.layout import SUFFIX, Part, Segment, Tensor, segment_of
from jaxllm.bundle.reader import Bundle
from jaxllm.formats import EXPERT_BITS, WEIGHT_FORMATS, WeightFormat

if TYPE_CHECKING:
    from jaxllm.bundle.writer import expert_widths, lay_experts_apart, rewrite_bundle, write_bundle

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


def __getattr__(name: str) -> Any:
    """Imports the writer of bundles when it is first used: a start only reads, and should not wait for it."""
    if name in ("expert_widths", "lay_experts_apart", "rewrite_bundle", "write_bundle"):
        from jaxllm.bundle import writer

        return getattr(writer, name)
    raise AttributeError(f"module 'jaxllm.bundle' has no attribute {name!r}")
