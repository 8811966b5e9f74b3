"""The widths that a context's chunks may be stored at, and its cache as it comes back from them."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contexts.systems import OURS
from jaxllm.kv.cache import KVCache
from serving.contexts.graphs import ContextGraphs
from serving.contexts.growth import grown
from serving.contexts.options import ContextOptions
from serving.contexts.record import Origin, Record

RAW = "raw"
EIGHT = "8 bit"
_FLAT = {EIGHT: 8, "4 bit": 4, "2 bit": 2}
_NOBODY = Record(
    name="",
    app="",
    origin=Origin(
        model="", level=100, adapter="", codec="raw", chunk_tokens=1, dtype="", heads=(), head_width=4
    ),
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A context that can come back from several forms.

    Attributes:
      graphs: of its engine.
      cache: as it was computed; all of its tokens are in whole chunks.
      widths: bits of each chunk, by form.
    """

    graphs: ContextGraphs
    cache: KVCache
    widths: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, graphs: ContextGraphs, tokens: list[int], ratios: Mapping[str, float], seed: int) -> "Stored":
        """Computes a context, and what its chunks are stored at.

        Args:
          graphs: of an engine that chooses widths.
          tokens: of the context; as many as fill whole chunks.
          ratios: by form, those that widths are chosen under; each also once with its widths shuffled over
            the chunks (but for the newest).
          seed: of that.
        """
        table, size = graphs.table, graphs.chunk_tokens
        assert len(tokens) % size == 0
        _, cache = table.prefill(table.start(table.options.context_tokens), tokens, 0)
        widths = {name: np.full(len(tokens) // size, bits) for name, bits in _FLAT.items()}
        mass = np.asarray(cache.mass)[0]
        for name, ratio in ratios.items():
            record = grown(
                _NOBODY, graphs, ContextOptions(folder="", ratio=ratio),
                tokens=tokens, mass=mass, first=0, held=len(tokens),
            )  # fmt: skip
            widths[name] = bits = np.array(record.bits)
            shuffled = np.random.default_rng(seed).permutation(bits[:-1])
            widths[f"{name}-shuffled"] = np.concatenate([shuffled, bits[-1:]])
        return cls(graphs, cache, widths)

    @property
    def forms(self) -> list[str]:
        """Their names, ours first."""
        return sorted([*self.widths, RAW], key=lambda name: not name.startswith(OURS))

    def back(self, form: str) -> KVCache:
        """The cache as it comes back from a form."""
        if form == RAW:
            return copied(self.cache)
        coded = self.graphs.encode(self.cache, dict(enumerate(self.widths[form].tolist())))
        table = self.graphs.table
        cache = self.graphs.load(table.start(table.options.context_tokens), coded)
        jax.block_until_ready(cache.keys)
        return dataclasses.replace(cache, length=np.int32(len(coded) * self.graphs.chunk_tokens))

    def bytes_of(self, form: str) -> int:
        """Of all chunks in a form."""
        if form == RAW:
            return sum(each.nbytes for each in (*self.cache.keys, *self.cache.values))
        return sum(self.graphs.chunk_bytes(bits) for bits in self.widths[form].tolist())


def copied(cache: KVCache) -> KVCache:
    """A cache that a graph may take while this one stays."""
    return jax.tree.map(jnp.copy, cache)
