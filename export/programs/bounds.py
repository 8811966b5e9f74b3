"""Checks bounds of a StableHLO program: it uses the manifest's arrays, and none that is far larger.

The computation of a program is not checked: trust a folder of programs as you would a library (see
SECURITY.md).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.arrays import SOURCE_TOKENS, source_shapes
from jaxllm.export.folder_format.codecs import CHUNK_TOKENS, coded_shapes
from jaxllm.export.folder_format.controls import COUNT, NEXT_TOKENS
from jaxllm.export.folder_format.manifest import Manifest, Signature
from jaxllm.export.folder_format.shapes import input_shapes
from jaxllm.export.folder_format.tiny_lm import KEEP, MODEL, PROMPT

if TYPE_CHECKING:
    import jax.export

# Factor over the largest argument or result of a program, and number of elements that is always allowed.
_LARGEST, _SMALL = 256, 1 << 20
_TENSOR = re.compile(r"\btensor<((?:[?*\d]+x)*)")
_CUSTOM_CALL = re.compile(r"\b\w+\.custom_call\b")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a program.

    Attributes:
      inputs, outputs: trees of the shapes of arguments and results.
    """

    inputs: Any
    outputs: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def largest_elements(self) -> int:
        """Maximum number of elements of an array."""
        return _SMALL + _LARGEST * max(math.prod(each.shape) for each in _leaves((self.inputs, self.outputs)))

    def require(self, exported: "jax.export.Exported", name: str) -> None:
        """Checks a program, called `name`, before it is compiled.

        Raises:
          ProgramError: its arguments or results are not those of the manifest, it calls external functions,
            or it allocates an array of an unknown size or of one that no model of this size has.
        """
        for verb, avals, tree, expected in (
            ("takes", exported.in_avals, exported.in_tree, (self.inputs, {})),
            ("returns", exported.out_avals, exported.out_tree, self.outputs),
        ):
            actual = [(tuple(each.shape), each.dtype.name) for each in avals]
            wanted = [(tuple(each.shape), each.dtype.name) for each in _leaves(expected)]
            if actual != wanted or tree != jax.tree.structure(expected):
                differing = [pair for pair in zip(actual, wanted, strict=False) if pair[0] != pair[1]][:1]
                raise ProgramError(
                    f"{name}: it {verb} {len(actual)} arrays, the manifest says {len(wanted)}, or others: "
                    f"{differing}; export the model again"
                )
        text = exported.mlir_module()
        if (call := _CUSTOM_CALL.search(text)) is not None:
            callee = text[call.end() : call.end() + 60].strip().split("(")[0]
            raise ProgramError(f"{name}: it calls {callee} outside of itself; export the model again")
        for shape in dict.fromkeys(_TENSOR.findall(text)):
            sizes = shape.split("x")[:-1]
            known = all(each.isdigit() for each in sizes)
            if not known or math.prod(map(int, sizes)) > self.largest_elements:
                raise ProgramError(
                    f"{name}: it allocates an array of {'x'.join(sizes)[:80]} numbers, and a model of its "
                    f"size at most {self.largest_elements}; export the model again"
                )


def program_bounds(signature: Signature, manifest: Manifest, weights: Mapping[str, Any]) -> Bounds:
    """The bounds of the program of a signature; `weights` are its level's."""
    cfg, dtype = manifest.levels[signature.level].cfg, jax.numpy.dtype(manifest.cache_dtype)
    shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in weights.items()}
    sources = max(manifest.encode_tokens(signature.level), default=0)
    adapter = 0 if manifest.adapters is None else manifest.adapters.size(signature.level)
    inputs = (shapes, *input_shapes(signature, cfg, manifest.room(signature), dtype, sources, adapter))
    return Bounds(inputs, _results(signature, manifest))


def _results(signature: Signature, manifest: Manifest) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a program's results."""
    dtype = jax.numpy.dtype(manifest.cache_dtype)
    if signature.kind == "tiny_lm":
        assert manifest.tiny_lm is not None
        sizes = {
            KEEP: signature.tokens,
            MODEL: len(manifest.tiny_lm.levels),
            PROMPT: len(manifest.tiny_lm.prompt_ratios),
        }
        return {name: jax.ShapeDtypeStruct((1, size), np.float32) for name, size in sizes.items()}
    if signature.kind == "encode_chunks":
        count = signature.tokens // CHUNK_TOKENS
        coded = coded_shapes(manifest.levels[signature.level].cfg, signature.codec, signature.bits, count)
        return {name: jax.ShapeDtypeStruct(*each) for name, each in coded.items()}
    if signature.kind == "encode":
        shapes = source_shapes(manifest.levels[signature.level].cfg, signature.tokens)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype)
            for name, shape in shapes.items()
            if name != SOURCE_TOKENS
        }
    caches = manifest.cache_shapes(signature.level, manifest.room(signature))
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in caches.items()}
    if signature.kind == "block":
        shapes[NEXT_TOKENS] = jax.ShapeDtypeStruct((1, signature.tokens), np.int32)
        shapes[COUNT] = jax.ShapeDtypeStruct((1,), np.int32)
    elif signature.kind not in ("prefill", "load_chunks"):
        vocab_size = manifest.levels[signature.level].cfg.vocab_size
        shapes["logits"] = jax.ShapeDtypeStruct((1, signature.tokens, vocab_size), np.float32)
    return shapes


def _leaves(tree: Any) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(tree)
