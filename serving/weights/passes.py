"""Says which pieces of a streamed model are read in a pass: over tokens, at a level, or over a source."""

from collections.abc import Iterable, Sequence

from jaxllm.bundle.layout import Layout
from jaxllm.config import ModelConfig
from jaxllm.serving.weights.pieces import HeadPiece, LayerPiece, Piece, parts_of_pieces, without_reads
from jaxllm.serving.weights.prefetch_plan import spread_evenly

# What a layer of the decoder reads of a source's hidden states, once per prompt.
_OF_SOURCE = ("cross.k", "cross.v", "cross.k_bias", "cross.v_bias")


class Passes:
    """The pieces of a model in the order of a pass: the encoder's layers, the layers, the head.

    Each kind of pass has all pieces; those that it does not read have no ranges.

    Attributes:
      whole: each piece as a whole, as when resident.
      of_tokens: the parts for tokens.
      of_level: the same, by a level's config.
      of_source: the parts for a source; empty ranges without an encoder.
      first_layer, first_head: numbers of the first layer, and of the first piece of the head.
      kept_first: numbers in the order of making pieces resident: parts for each token before parts for each
        prompt.
    """

    def __init__(
        self,
        layout: Layout,
        encoder: Sequence[LayerPiece],
        layers: Sequence[LayerPiece],
        head: Sequence[HeadPiece],
    ) -> None:
        self.first_layer, self.first_head = len(encoder), len(encoder) + len(layers)
        self.whole: list[Piece] = [*encoder, *layers, *head]
        self.of_tokens, self.of_source = self.whole, list[Piece]()
        if encoder:
            once = parts_of_pieces(layout, layers, lambda name: name in _OF_SOURCE)
            each = parts_of_pieces(layout, layers, lambda name: name not in _OF_SOURCE)
            self.of_source = [*encoder, *once, *map(without_reads, head)]
            self.of_tokens = [*map(without_reads, encoder), *each, *head]
        self.of_level: dict[ModelConfig, list[Piece]] = {}
        self._layout, self._encoder, self._head = layout, encoder, head
        later = [self.first_layer + each for each in spread_evenly(len(self.whole) - self.first_layer)]
        self.kept_first = [*later, *(spread_evenly(len(encoder)) if encoder else ())]

    def add_level(self, cfg: ModelConfig, layers: Sequence[LayerPiece]) -> None:
        """Adds the pass of a level with these pieces of layers; sources are read as for the whole model."""
        if self._encoder:
            layers = parts_of_pieces(self._layout, layers, lambda name: name not in _OF_SOURCE)
        self.of_level[cfg] = [*map(without_reads, self._encoder), *layers, *self._head]

    @property
    def all_reads(self) -> Iterable[Sequence[Piece]]:
        """The pieces of every kind of pass."""
        return self.whole, self.of_tokens, self.of_source, *self.of_level.values()
