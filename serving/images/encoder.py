"""Encodes images as rows of the text model, tile by tile, and caches those of repeated images."""

import collections
import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxllm.bundle.images import StoredImageEncoder, read_image_encoder_part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.models.encoder.image_input import ImageInput, tiles_of
from jaxllm.models.encoder.siglip import ImageEncoderConfig, image_rows
from jaxllm.serving.buckets.bucket import Bucket, shapes_of
from jaxllm.serving.buckets.bucket_table import BucketStore, BucketTable
from jaxllm.serving.images.prompt import EncodedImage, Tiles, normalized, open_image, tiles

# Size limit of cached rows: some 25 images of 13 tiles of SmolVLM-256M's 64 rows.
MOST_BYTES = 48 << 20


class ImageEncoder:
    """Encodes images for one model. `cut_all` may run in any thread, other methods in the engine's.

    Args:
      stored: its weights and its input; converted to float32 in memory, at first use.
      store: store of its bucket; None compiles it.

    Attributes:
      input: splits of images.
    """

    def __init__(self, stored: StoredImageEncoder, store: BucketStore | None = None) -> None:
        self._stored, self._store = stored, store
        self.input: ImageInput = stored.input
        self._lock = threading.Lock()
        self._ready: tuple[Any, BucketTable] | None = None
        self._known: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

    @classmethod
    def of(cls, bundle: Bundle, store: BucketStore | None = None) -> "ImageEncoder | None":
        """Makes the encoder of a bundle; None if it has none."""
        stored = read_image_encoder_part(bundle)
        return None if stored is None else cls(stored, store)

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum(4 * each.size for each in self._stored.params.values())

    def prepare(self) -> None:
        """Loads the weights and compiles the bucket, or reads it from disk, before the first image."""
        with self._lock:
            if self._ready is None:
                cfg = self._stored.cfg
                params = {
                    name: jax.device_put(np.asarray(value, np.float32))
                    for name, value in self._stored.params.items()
                }
                store = None if self._store is None else self._store.of(cfg, params)
                buckets = BucketTable((cfg, shapes_of(params)), store)
                buckets.fill([ImageBucket()])
                self._ready = params, buckets

    def encode_tile(self, pixels: np.ndarray, owner: str = "") -> np.ndarray:
        """The rows `[R, D]` of a tile `[size, size, 3]`; those of an earlier call with the same pixels, for
        the same owner, are remembered."""
        key = xxhash.xxh3_128_hexdigest(pixels.tobytes()) + owner
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        self.prepare()
        assert self._ready is not None
        params, buckets = self._ready
        made = buckets.get(ImageBucket())(params, normalized(pixels[None], self.input))
        rows = np.array(made, np.float32)[0]
        if not np.isfinite(rows).all():
            raise ConfigError("the encoder of images gives NaN or infinite values; prepare the model again")
        rows.flags.writeable = False
        self._known[key] = rows
        while self._known and sum(each.nbytes for each in self._known.values()) > MOST_BYTES:
            self._known.popitem(last=False)
        return rows

    def cut_all(self, files: Sequence[bytes], window_tokens: int) -> list[Tiles]:
        """The tiles of images whose rows must fit a context.

        Raises:
          ConfigError: see `open_image`.
          ContextOverflow: there are more rows than the context has tokens.
        """
        found, rows = [], 0
        for each in files:
            found.append(tiles(open_image(each), self.input))
            rows += tiles_of(found[-1].grid) * self._stored.cfg.rows
            # Before the next image is decoded, and before any row is computed.
            if rows >= window_tokens:
                raise ContextOverflow(
                    f"the images take {rows} tokens, the context holds {window_tokens} with text and answer; "
                    "send fewer or smaller ones, or ask for a longer --context"
                )
        return found

    def encode(self, images: Sequence[Tiles]) -> list[EncodedImage]:
        """Images in tiles as rows, all of them at once."""
        return [self.joined(each, [self.encode_tile(tile) for tile in each.pixels]) for each in images]

    def joined(self, found: Tiles, rows: Sequence[np.ndarray]) -> EncodedImage:
        """An image of the rows of its tiles."""
        return EncodedImage(found.grid, np.concatenate(rows), self.input.image_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageBucket(Bucket):
    """Computes the rows of one tile."""

    def lower(self, model: tuple[ImageEncoderConfig, Any], /) -> jax.stages.Lowered:
        """(params, pixels) -> rows; `model` has the config and the shapes of the parameters."""
        cfg, params = model
        pixels = jax.ShapeDtypeStruct((1, cfg.channels, cfg.image_size, cfg.image_size), jnp.float32)
        return jax.jit(functools.partial(image_rows, cfg=cfg)).lower(params, pixels)
