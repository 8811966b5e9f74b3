"""SmolVLM's image encoder: SigLIP (arXiv 2303.15343) over square images, and the connector that turns its
outputs into rows of the text model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.layer_configs import require, require_types
from jaxllm.nn.layers import Norm, activate, attention, normalize
from jaxllm.nn.linear import to_units


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig:
    """Shape of an encoder of images.

    Attributes:
      image_size: height and width of an image in pixels.
      patch_size: side of a square patch; an image has P = (image_size / patch_size)² of them.
      hidden_size, ffn_size, layers, heads: sizes of the encoder (W, F, L, N).
      activation, norm_eps: activation and norm epsilon of its layers.
      shuffle: the connector puts squares of `shuffle` by `shuffle` patches into one row.
      row_size: size of a row, the text model's hidden size (D).
    """

    image_size: int
    patch_size: int
    channels: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    activation: Activation
    norm_eps: float
    shuffle: int
    row_size: int

    def __post_init__(self) -> None:
        require_types(self)
        require(self.norm_eps > 0, f"norm_eps must be positive, got {self.norm_eps}")
        require(
            self.image_size % self.patch_size == 0 and self.side % self.shuffle == 0,
            f"images of {self.image_size} pixels do not divide into squares of {self.shuffle} patches of "
            f"{self.patch_size}",
        )
        require(
            self.hidden_size % self.heads == 0,
            f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads})",
        )

    def to_json(self) -> dict[str, Any]:
        """Its fields as JSON values."""
        return dataclasses.asdict(self)

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return self.image_size // self.patch_size

    @property
    def rows(self) -> int:
        """Rows of an image."""
        return (self.side // self.shuffle) ** 2


def image_encoder_shapes(cfg: ImageEncoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters by name; every matrix is `[out, in]`."""
    width, ffn = cfg.hidden_size, cfg.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "patches": (width, cfg.channels * cfg.patch_size**2),
        "patches_bias": (width,),
        "positions": (cfg.side**2, width),
    }
    for layer in range(cfg.layers):
        own: dict[str, tuple[int, ...]] = {}
        for name, outputs, inputs in (
            *((each, width, width) for each in ("q", "k", "v", "o")),
            ("up", ffn, width),
            ("down", width, ffn),
        ):
            own |= {name: (outputs, inputs), f"{name}_bias": (outputs,)}
        for norm in ("attn_norm", "ffn_norm"):
            own |= {f"{norm}.scale": (width,), f"{norm}.bias": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes |= {"final_norm.scale": (width,), "final_norm.bias": (width,)}
    return shapes | {"connector": (cfg.row_size, width * cfg.shuffle**2)}


def image_rows(
    params: Mapping[str, jax.Array | np.ndarray], pixels: jax.Array, *, cfg: ImageEncoderConfig
) -> jax.Array:
    """Rows `[n, R, D]` of images, for `jaxllm.serving.ground.prompt_embeddings`, from pixels `[n, channels,
    size, size]` float32, normalized as the model was trained."""
    count, side, shuffle = pixels.shape[0], cfg.side, cfg.shuffle
    weights = {name: jnp.asarray(each) for name, each in params.items()}

    def product(x: jax.Array, name: str) -> jax.Array:
        return to_units(x, weights[name], weights.get(f"{name}_bias"))

    def normed(x: jax.Array, name: str) -> jax.Array:
        return normalize(x, Norm(weights[f"{name}.scale"], weights[f"{name}.bias"], cfg.norm_eps))

    cut = pixels.reshape(count, cfg.channels, side, cfg.patch_size, side, cfg.patch_size)
    cut = cut.transpose(0, 2, 4, 1, 3, 5).reshape(count, side * side, -1)
    x = product(cut, "patches") + weights["positions"]
    everything = jnp.ones((side * side,) * 2, jnp.bool_)
    for layer in range(cfg.layers):
        lead = f"layers.{layer}."
        before = normed(x, f"{lead}attn_norm")
        q, k, v = (product(before, lead + name).reshape(count, side * side, cfg.heads, -1) for name in "qkv")
        scale = (cfg.hidden_size // cfg.heads) ** -0.5
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        out = attention(q[:, :, :, None], keys, values, everything, scale=scale)
        x = x + product(out.reshape(x.shape), f"{lead}o")
        hidden = activate(product(normed(x, f"{lead}ffn_norm"), f"{lead}up"), cfg.activation)
        x = x + product(hidden, f"{lead}down")
    x = normed(x, "final_norm")
    squares = x.reshape(count, side // shuffle, shuffle, side // shuffle, shuffle * cfg.hidden_size)
    return product(squares.transpose(0, 1, 3, 2, 4).reshape(count, cfg.rows, -1), "connector")
