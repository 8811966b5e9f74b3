"""Locates the experts of a bundle in its file, and makes weights of their bytes."""

import collections
import dataclasses
import functools
import mmap

import jax
import numpy as np

from jaxllm.bundle import Bundle, Segment
from jaxllm.bundle.layout import PAGE
from jaxllm.errors import ConfigError
from jaxllm.kernels.native import WeightTable
from jaxllm.models.parameters import sparse_layers
from jaxllm.quant import BlockedArray, Weight
from jaxllm.serving.buckets.bucket import EXPERT_PARTS, HIGH, NESTED, expert_parts

# Index among the sparse layers, expert.
Key = tuple[int, int]
# The same and the plane: 0 for the high one, and of experts of one plane; 1 for the low one.
PlaneKey = tuple[int, int, int]
_FLOAT_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclasses.dataclass(frozen=True)
class StoredExpert:
    """One expert in the file.

    Attributes:
      planes: segments of the high and the low plane of a nested expert; else one. A plane is the unit of
        loading.
      bits: its bitwidth, of all planes; 16 and 32 for floats.
    """

    planes: tuple[Segment, ...]
    bits: int

    @property
    def nested(self) -> bool:
        """Whether it has two planes."""
        return len(self.planes) == 2

    @property
    def form(self) -> str:
        """Name of the form that experts of the same arrays share."""
        return NESTED if self.nested else str(self.bits)

    @property
    def memory_bytes(self) -> int:
        """Its size in whole pages."""
        return sum(map(memory_bytes, self.planes))


def memory_bytes(plane: Segment) -> int:
    """The size of a plane in whole pages."""
    return -(-plane.size_bytes // PAGE) * PAGE


def hot_bytes(bundle: Bundle) -> int:
    """Bytes of the parameters for every token: all but experts."""
    return sum(each.size_bytes for name, each in bundle.layout.tensors.items() if ".experts." not in name)


class ExpertStore:
    """The experts of a bundle that stores them separately.

    Attributes:
      bundle: an open bundle.
      layers: the prefixes of all sparse layers (see `sparse_layers`); keys have the index among them.
      sparse: the sparse layers of the decoder, ascending.
      of_encoder: number of sparse layers of the encoder, which come first.
      experts: number of experts per layer (E).
    """

    def __init__(self, bundle: Bundle) -> None:
        """Reads nothing.

        Raises:
          ConfigError: the experts of a layer are stored together.
        """
        if not bundle.layout.experts_apart:
            raise ConfigError(
                f"{bundle.path} stores its experts together; lay them apart by `jaxllm prepare "
                "--expert-bits` or `jaxllm calibrate experts`"
            )
        self.bundle, cfg = bundle, bundle.cfg
        self.sparse = [layer for layer in range(cfg.layers) if cfg.is_sparse(layer)]
        self.layers, self.experts = sparse_layers(cfg), cfg.experts
        self.of_encoder = len(self.layers) - len(self.sparse)
        self._stored = {
            (at, expert): self._of(layer, expert)
            for at, layer in enumerate(self.layers)
            for expert in range(cfg.experts)
        }

    def __getitem__(self, key: Key) -> StoredExpert:
        return self._stored[key]

    @functools.cached_property
    def forms(self) -> tuple[str, ...]:
        """The forms of all experts."""
        return tuple(sorted({each.form for each in self._stored.values()}))

    @functools.cached_property
    def planes(self) -> int:
        """Maximum number of planes of an expert."""
        return max(len(each.planes) for each in self._stored.values())

    @property
    def in_blocks(self) -> bool:
        """Whether native kernels read all experts in place."""
        return self.bundle.read_in_place and not {each.bits for each in self._stored.values()} & {16, 32}

    @functools.cached_property
    def total_bytes(self) -> int:
        """Memory of all experts."""
        return sum(each.memory_bytes for each in self._stored.values())

    @property
    def largest_bytes(self) -> int:
        """Memory of the largest expert."""
        return max(each.memory_bytes for each in self._stored.values())

    def least_bytes(self) -> int:
        """Maximum memory of the experts that a token visits at one layer."""
        count = self.bundle.cfg.experts_per_token
        by_layer = [
            sorted(self[at, expert].memory_bytes for expert in range(self.experts))
            for at in range(len(self.layers))
        ]
        return max(sum(sizes[-count:]) for sizes in by_layer)

    def plane(self, key: PlaneKey) -> Segment:
        """A plane in the file."""
        return self._stored[key[:2]].planes[key[2]]

    def planes_of(self, key: Key, needed: int) -> list[PlaneKey]:
        """The first `needed` planes of an expert, or all if it has fewer."""
        return [(*key, plane) for plane in range(min(needed, len(self[key].planes)))]

    def named(self, key: PlaneKey) -> str:
        """A plane as messages name it."""
        side, _, layer = self.layers[key[0]].rstrip(".").rpartition("layers.")
        expert = f"expert {key[1]} of {'encoder ' * bool(side)}layer {layer}"
        return f"the {('high', 'low')[key[2]]} plane of {expert}" if self[key[:2]].nested else expert

    def weights(self, key: Key, *memory: np.ndarray) -> dict[str, Weight]:
        """An expert's "gate", "up" and "down" `[F, D]` from the bytes of its planes in other memory, or of
        only the high one (see `Bundle.segment_weights`)."""
        found = self.bundle.segment_weights(self[key].planes[0].name, *memory)
        return {name.rsplit(".", 1)[1]: each for name, each in found.items()}

    def any_expert(self, form: str) -> dict[str, Weight]:
        """Shapes of an expert in a format, or of only its high plane."""
        key = next(
            key for key, each in self._stored.items() if each.form == (NESTED if form == HIGH else form)
        )
        planes = self[key].planes[: 1 if form == HIGH else None]
        weights = self.weights(key, *(np.zeros(memory_bytes(each), np.uint8) for each in planes))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)

    def _of(self, layer: str, expert: int) -> StoredExpert:
        layout = self.bundle.layout
        name = f"{layer}experts.{expert}"
        tensors = layout.by_segment[name].values()
        widths = {(each.width or _FLOAT_BITS[each.data.dtype], each.low is not None) for each in tensors}
        planes = [layout.segments[each] for each in {each.segments: 0 for each in tensors}.popitem()[0]]
        odd = any(each.offset % PAGE for each in planes)
        if len(widths) > 1 or len(tensors) != len(expert_parts(self.bundle.cfg)) or odd:
            raise ConfigError(f"{self.bundle.path}: {name} is stored in an odd way")
        return StoredExpert(tuple(planes), widths.pop()[0])


# Whether the system can free memory and keep its address space.
_LASTING = hasattr(mmap, "MADV_DONTNEED")


class Regions:
    """The memory of all planes, each in its own address space, never reused for another: it has memory while
    the plane is resident. So the same JAX arrays, made once, are valid whenever the plane is resident.

    Attributes:
      weight_table: weight table of all experts, a row per sparse layer (see `native_experts.stored_visits`);
        None if native kernels do not read them in place.
    """

    def __init__(self, store: ExpertStore) -> None:
        """Reserves address space if there is a weight table; memory is committed when planes are read."""
        self._store = store
        self._mapped: dict[PlaneKey, tuple[mmap.mmap, np.ndarray]] = {}
        self._weights: dict[tuple[Key, int], dict[str, Weight]] = {}
        self.weight_table: WeightTable | None = None
        # The kernel that finds experts by address supports gated ones without biases.
        gated, biased = store.bundle.cfg.gated_ffn, store.bundle.cfg.expert_bias
        if gated and not biased and store.in_blocks and _LASTING:
            self.weight_table = WeightTable([self._row(layer) for layer in range(len(store.sparse))])

    def memory(self, key: PlaneKey) -> np.ndarray:
        """The memory of a plane, uint8, page-aligned."""
        if key not in self._mapped:
            mapping = mmap.mmap(-1, memory_bytes(self._store.plane(key)))
            self._mapped[key] = mapping, np.frombuffer(mapping, np.uint8)
        return self._mapped[key][1]

    def free(self, key: PlaneKey) -> None:
        """Frees the memory of a plane."""
        if _LASTING:
            self._mapped[key][0].madvise(mmap.MADV_DONTNEED)
        else:
            del self._mapped[key]
            self._weights = {known: each for known, each in self._weights.items() if known[0] != key[:2]}

    def weights(self, key: Key, planes: int) -> dict[str, Weight]:
        """An expert's weights by its first `planes` planes, which are resident."""
        needed = self._store.planes_of(key, planes)
        if (known := self._weights.get((key, len(needed)))) is not None:
            return known
        found = self._store.weights(key, *map(self.memory, needed))
        if self._store.bundle.read_in_place:
            self._weights[key, len(needed)] = found
        return found

    def _row(self, layer: int) -> list[np.ndarray | None]:
        """The arrays of all experts of a sparse layer."""
        row: list[np.ndarray | None] = []
        for expert in range(self._store.experts):
            key = layer, expert
            weights = self._store.weights(key, *map(self.memory, self._store.planes_of(key, 2)))
            for part in EXPERT_PARTS:
                weight = weights[part]
                assert isinstance(weight, BlockedArray)
                row += [np.asarray(weight.data), np.asarray(weight.scale)]
                row.append(None if weight.low is None else np.asarray(weight.low))
        return row


@dataclasses.dataclass(eq=False)
class Slot:
    """A plane that is resident or being read.

    Attributes:
      memory: memory of its region.
      unread: (start, size) of blocks that no thread has started to read.
      in_flight: number of blocks being read.
      attempts: number of completed reads with a wrong checksum.
      ready: whether it is complete and checked.
      error: error of the read.
      guessed: whether it was prefetched and not visited yet.
      pinned: whether it is being computed.
    """

    memory: np.ndarray
    unread: collections.deque[tuple[int, int]]
    in_flight: int = 0
    attempts: int = 0
    ready: bool = False
    error: Exception | None = None
    guessed: bool = False
    pinned: bool = False

    @property
    def usable(self) -> bool:
        """Whether it can be computed with."""
        return self.ready and self.error is None
