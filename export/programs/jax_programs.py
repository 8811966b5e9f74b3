"""Runs programs by JAX: compiled once, cached for later processes, with donated caches; and samples tokens by
buckets that are compiled ahead of time.

StableHLO programs have separate weights. A program's sizes are checked before it is compiled: it uses the
manifest's arrays, and none that is far larger. Its computation is not checked: trust a folder of programs as
you would a library (see SECURITY.md).
"""

import abc
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.contents import require_extra
from jaxllm.export.folder_format.manifest import TINY_WEIGHTS, WEIGHTS, Manifest
from jaxllm.export.folder_format.signature import CODED_KINDS, Shapes, Signature, lengthened
from jaxllm.export.folder_format.weights import read_weights
from jaxllm.export.programs.executor import Executor, FolderAdapters
from jaxllm.sampling import SamplerState, Sampling, sample, sampler_state
from jaxllm.serving.buckets.bucket import Bucket, ids, shapes_of, tree_shapes
from jaxllm.serving.buckets.bucket_table import BucketStore, BucketTable, CompiledBucketFolder
from jaxllm.serving.host.progress import Progress
from jaxllm.speculation.token_tree import TokenTree
from jaxllm.speculation.tree import choices

if TYPE_CHECKING:
    import jax.export

# JAX's name of a platform -> the name in manifests.
_PLATFORMS = {"gpu": "cuda"}
# Alignment in bytes of an array that a CPU uses in place.
_ALIGN = 64
# Maximum bytes of one program, which has no weights.
MAX_PROGRAM_BYTES = 64 << 20
# Factor over the largest argument or result of a program, and number of elements that is always allowed.
_LARGEST, _SMALL = 256, 1 << 20
_TENSOR = re.compile(r"\btensor<((?:[?*\d]+x)*)")
_CUSTOM_CALL = re.compile(r"\b\w+\.custom_call\b")
Caches = dict[str, jax.Array]
# Name, shape and dtype of each cache, sorted by name: a field of a bucket.
_CacheShapes = tuple[tuple[str, tuple[int, ...], str], ...]


class JaxPrograms(Executor):
    """Common part of executors on JAX."""

    def __init__(
        self,
        manifest: Manifest,
        weights: Mapping[int, Mapping[str, Any]],
        folder: CompiledBucketFolder | None = None,
        *,
        tiny_lm: Mapping[str, Any] | None = None,
        adapters: FolderAdapters | None = None,
    ) -> None:
        """Makes an executor.

        Args:
          folder: cache of compiled buckets; None caches none.
          tiny_lm: weights of the tiny LM; None for none.
          adapters: adapters that programs accept; None for none.
        """
        super().__init__(manifest, adapters or FolderAdapters(manifest))
        self._weights, self._tiny_lm = weights, tiny_lm or {}
        self._programs: dict[str, ProgramBucket] = {}
        # Found by name, because every token needs one.
        self._compiled: dict[str, Any] = {}
        self._buckets, store = BucketTable(), None if folder is None else BucketStore.of_programs(folder)
        for level in weights:
            self._buckets.add_level(level, self, store)

    @abc.abstractmethod
    def step(self, signature: Signature) -> Callable[..., dict[str, jax.Array]]:
        """The step of a signature: (weights, caches, inputs) -> caches and outputs."""

    @abc.abstractmethod
    def contents(self, signature: Signature) -> str:
        """Key of the contents of a signature's program."""

    def prepare(self, signatures: Sequence[Signature], progress: Progress | None = None) -> None:
        """See `Executor`; several at a time, from disk if an earlier process stored them."""
        for each in signatures:
            if not self.is_ready(each):
                # Its file may have been replaced since it failed.
                self._programs.pop(each.name, None)
        buckets: list[Bucket] = [self._program_bucket(each) for each in signatures]
        rooms = {(each.level, self.manifest.room(each)) for each in signatures}
        for level in {level for level, _ in rooms}:
            for short, long in itertools.pairwise(self.manifest.cache_tokens(level)):
                if {(level, short), (level, long)} <= rooms:
                    buckets.append(self._grow_bucket(level, short, long))
        buckets += [self._keep_bucket(each) for each in signatures if each.kind == "verify"]
        self._buckets.fill(buckets, progress)

    def is_ready(self, signature: Signature) -> bool:
        """See `Executor`."""
        bucket = self._programs.get(signature.name)
        return bucket is not None and self._buckets.is_ready(bucket)

    def compile(self, signature: Signature) -> None:
        """Gets one program ready, in this thread."""
        self._buckets.fill_here([self._program_bucket(signature)])

    def grow(self, level: int, caches: Caches, cache_tokens: int) -> Caches:
        """See `Executor`."""
        short = next(iter(caches.values())).shape[2]
        return self._buckets.get_filled(self._grow_bucket(level, short, cache_tokens))(caches)

    def rows(self, level: int, caches: Caches, tokens: int) -> dict[str, np.ndarray]:
        """See `Executor`."""
        del level
        # Cut on the host: slicing a device's array would compile a computation.
        return {name: np.array(np.asarray(each)[:, :, :tokens]) for name, each in caches.items()}

    def restored(self, level: int, cache_tokens: int, rows: Mapping[str, np.ndarray]) -> Caches:
        """See `Executor`."""
        dtype, found = jnp.dtype(self.manifest.cache_dtype), {}
        for name, shape in self.manifest.cache_shapes(level, cache_tokens).items():
            own = lengthened(rows[name], shape) if rows else np.zeros(shape, dtype)
            found[name] = jax.device_put(own)
        return found

    def place(self, level: int, inputs: Mapping[str, np.ndarray]) -> Caches:
        """See `Executor`."""
        del level
        return jax.device_put(dict(inputs))

    def run(
        self, signature: Signature, inputs: Mapping[str, Any], caches: Caches | None = None
    ) -> tuple[dict[str, Any], Any]:
        """See `Executor`."""
        self._buckets.require_usable()
        program = self._compiled.get(signature.name)
        if program is None:
            if not self.is_ready(signature):
                self.prepare([signature])
            program = self._buckets.get(self._program_bucket(signature))
            self._compiled[signature.name] = program
        out = program(self.weights_of(signature), caches or {}, self._adapted(signature, inputs))
        outputs = {name: out.pop(name) for name in self._interface(signature).outputs}
        return outputs, out or caches

    def keep(self, signature: Signature, caches: Caches, at: int, path: np.ndarray) -> Caches:
        """See `Executor`."""
        nodes = np.arange(signature.tokens, dtype=np.int32)
        nodes[: len(path)] = path
        return self._buckets.get_filled(self._keep_bucket(signature))(caches, np.int32(at), nodes)

    def weights_of(self, signature: Signature) -> Mapping[str, Any]:
        """The weights of a signature's program by name."""
        if signature.kind in CODED_KINDS:
            return {}
        return self._tiny_lm if signature.kind == "tiny_lm" else self._weights[signature.level]

    def path(self, signature: Signature) -> str:
        """The path of a program, for messages."""
        return signature.name

    def _program_bucket(self, signature: Signature) -> "ProgramBucket":
        if signature.name not in self._programs:
            self._programs[signature.name] = ProgramBucket(
                signature=signature, contents=self.contents(signature), level=signature.level
            )
        return self._programs[signature.name]

    def _grow_bucket(self, level: int, short: int, long: int) -> Bucket:
        shapes = self._cache_shapes(level, short)
        return ProgramGrowBucket(short_tokens=short, long_tokens=long, shapes=shapes, level=level)

    def _keep_bucket(self, signature: Signature) -> Bucket:
        shapes = self._cache_shapes(signature.level, self.manifest.room(signature))
        return ProgramKeepBucket(nodes=signature.tokens, shapes=shapes, level=signature.level)

    def _cache_shapes(self, level: int, cache_tokens: int) -> _CacheShapes:
        shapes = self.manifest.cache_shapes(level, cache_tokens).items()
        return tuple(sorted((name, shape, self.manifest.cache_dtype) for name, shape in shapes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramBucket(Bucket):
    """Runs one exported step."""

    signature: Signature
    contents: str

    def lower(self, model: JaxPrograms, /) -> jax.stages.Lowered:
        """(weights, caches, inputs) -> caches and outputs."""
        interface = model.manifest.interface(self.signature)
        # Exported functions do not donate: without donation here every step would copy the caches.
        donated = (1,) if interface.writes else ()
        step = jax.jit(model.step(self.signature), donate_argnums=donated, keep_unused=True)
        caches, inputs = jax_shapes(interface.caches), jax_shapes(interface.inputs)
        return step.lower(model.weights_of(self.signature), caches, inputs)

    def compile(self, model: JaxPrograms, /) -> jax.stages.Compiled:
        """See `Bucket`.

        Raises:
          ProgramError: the program is rejected, or cannot be compiled.
        """
        try:
            return super().compile(model)
        except (ProgramError, MemoryError):
            raise
        except Exception as error:  # JAX and XLA raise errors of many types here.
            raise ProgramError(
                f"{model.path(self.signature)}: cannot be compiled ({one_line(error)}); export the model "
                "again"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramGrowBucket(Bucket):
    """Pads a level's caches, of `shapes`, from one length to another."""

    short_tokens: int
    long_tokens: int
    shapes: _CacheShapes

    def lower(self, model: JaxPrograms, /) -> jax.stages.Lowered:
        """(caches) -> caches."""
        del model
        added = self.long_tokens - self.short_tokens

        def padded(caches: Caches) -> Caches:
            return {
                name: jnp.pad(rows, ((0, 0), (0, 0), (0, added), (0, 0))) for name, rows in caches.items()
            }

        # Nothing is donated: no buffer of the short caches has the size of one of the long caches.
        return jax.jit(padded).lower(_named(self.shapes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKeepBucket(Bucket):
    """Moves the accepted path of a tree of `nodes` nodes (M) to the tree's first row."""

    nodes: int
    shapes: _CacheShapes

    def lower(self, model: JaxPrograms, /) -> jax.stages.Lowered:
        """(caches, row of the root, nodes) -> caches."""
        del model

        def moved(caches: Caches, at: jax.Array, nodes: jax.Array) -> Caches:
            return {
                name: jax.lax.dynamic_update_slice_in_dim(
                    rows, jnp.take(rows, at + nodes, axis=2), at, axis=2
                )
                for name, rows in caches.items()
            }

        keep = jax.jit(moved, donate_argnums=(0,))
        return keep.lower(_named(self.shapes), np.int32(0), ids(self.nodes))


def jax_shapes(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of arrays as JAX traces them."""
    return {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}


def _named(shapes: _CacheShapes) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape, dtype in shapes}


class StableHloExecutor(JaxPrograms):
    """Runs the programs of a folder. On a CPU the weights are in memory once, and a level reads the first
    units of the whole model's; other devices have a copy for each level."""

    def __init__(self, manifest: Manifest, folder: Path, kept: CompiledBucketFolder | None = None) -> None:
        """Opens the folder.

        Raises:
          ConfigError: the programs are for other devices, or the extra is missing.
          ProgramError: a file is corrupt, or the weights are another model's.
        """
        require_extra("stablehlo", "flatbuffers")
        device = jax.devices()[0]
        platform = _PLATFORMS.get(device.platform, device.platform)
        if platform not in manifest.platforms:
            raise ConfigError(
                f"{folder} was exported for {', '.join(manifest.platforms)}, this device is {platform}; "
                f"export the model with --platform {platform}"
            )
        arrays = read_weights(manifest.require_intact(folder, WEIGHTS), model=manifest.model)
        if platform == "cpu":
            # In one block of memory, which the system allocates in large pages: a decoded token reads all
            # weights, which is slower from the small pages of a mapped file.
            block = np.empty(
                sum(each.nbytes + -each.nbytes % _ALIGN for each in arrays.values()) + _ALIGN, np.uint8
            )
            at, mapped = -block.ctypes.data % _ALIGN, arrays
            arrays = {}
            for name, each in mapped.items():
                arrays[name] = block[at : at + each.nbytes].view(each.dtype).reshape(each.shape)
                arrays[name][...] = each
                at += each.nbytes + -each.nbytes % _ALIGN
        weights = {
            level: {
                name: jax.device_put(view, device, may_alias=True)
                for name, view in each.views(arrays).items()
            }
            for level, each in manifest.levels.items()
        }
        adapters, tiny = FolderAdapters(manifest, folder), {}
        if manifest.tiny_lm is not None:
            stored = read_weights(manifest.require_intact(folder, TINY_WEIGHTS), model=manifest.model)
            tiny = {name: jax.device_put(each) for name, each in stored.items()}
        super().__init__(manifest, weights, kept, tiny_lm=tiny, adapters=adapters)
        self._folder = folder

    def step(self, signature: Signature) -> Callable[..., dict[str, jax.Array]]:
        """See `JaxPrograms`; the program is within its bounds."""
        # Imported here, because it is slow and cached buckets do not need it.
        import jax.export

        exported = jax.export.deserialize(bytearray(self._program(signature)))
        self.bounds(signature).require(exported, self.path(signature))
        # Results have the names that were checked.
        return cast("Callable[..., dict[str, jax.Array]]", exported.call)

    def contents(self, signature: Signature) -> str:
        """See `JaxPrograms`; by SHA-256, so that no other file has it."""
        return f"{hashlib.sha256(self._program(signature)).hexdigest()} {self.bounds(signature)}"

    def _program(self, signature: Signature) -> bytes:
        return self.manifest.read_intact(self._folder, signature.file, most_bytes=MAX_PROGRAM_BYTES)

    def bounds(self, signature: Signature) -> "Bounds":
        """The bounds of a signature's program."""
        interface, weights = self.manifest.interface(signature), self.weights_of(signature)
        shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in weights.items()}
        caches, outputs = jax_shapes(interface.caches), jax_shapes(interface.outputs)
        inputs = shapes, caches, jax_shapes(interface.inputs)
        return Bounds(inputs, caches | outputs if interface.writes else outputs)

    def path(self, signature: Signature) -> str:
        """See `JaxPrograms`."""
        return str(self._folder / signature.file)


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
        return _SMALL + _LARGEST * max(
            math.prod(each.shape) for each in jax.tree.leaves((self.inputs, self.outputs))
        )

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
            wanted = [(tuple(each.shape), each.dtype.name) for each in jax.tree.leaves(expected)]
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceBucket(Bucket):
    """Draws a token after each node of a tree from logits on the host (see
    `jaxllm.speculation.tree.choices`).

    Attributes:
      nodes: capacity of the tree; 0 for the next token of a sequence (see `jaxllm.sampling.sample`).
    """

    nodes: int
    vocab_tokens: int

    def lower(self, model: None, /) -> jax.stages.Lowered:
        """([tree,] logits, sampler) -> token and sampler, or tokens."""
        del model
        logits = jax.ShapeDtypeStruct((max(1, self.nodes), self.vocab_tokens), np.float32)
        sampler = shapes_of(sampler_state(Sampling(), [], self.vocab_tokens, 0))
        if not self.nodes:
            return jax.jit(sample).lower(logits, sampler)
        return jax.jit(choices).lower(tree_shapes(self.nodes), logits, sampler)


class BucketChooser:
    """Samples tokens of a vocabulary.

    Args:
      folder: cache of compiled buckets; None caches none.
    """

    def __init__(self, vocab_size: int, folder: CompiledBucketFolder | None = None) -> None:
        self._vocab_size = vocab_size
        self._buckets = BucketTable(None, None if folder is None else BucketStore.of_programs(folder))

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """See `TokenChooser`: compiles the buckets."""
        self._buckets.fill(self._bucket(nodes) for nodes in (0, *trees))

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """See `TokenChooser`."""
        return self._ready(0)(np.asarray(logits), sampler)

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> jax.Array:
        """See `TokenChooser`."""
        return self._ready(tree.room)(tree, np.asarray(logits), sampler)

    def _ready(self, nodes: int) -> Any:
        return self._buckets.get_filled(self._bucket(nodes))

    def _bucket(self, nodes: int) -> ChoiceBucket:
        return ChoiceBucket(nodes=nodes, vocab_tokens=self._vocab_size)
