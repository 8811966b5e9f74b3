"""Makes the target's bundles for STI (arXiv 2207.05022): shards of a model, each with bits by its importance.

STI keeps a model as shards whose bitwidths are chosen one by one: all get the widest that fits, and what is
left goes to the shards that matter most to accuracy. Here a shard is a layer's attention or its feed-forward
block, the smallest that the kernels of all systems compute at a bitwidth of its own; embedding and head stay
as the target has them. A shard's importance is the loss that the model gains on given texts when the shard
alone has the fewest bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward, logits
from jaxllm.models.parameters import param_specs
from jaxllm.quant import BITS, BlockedArray, dequantize, quantize, to_blocks
from jaxllm.quant.formats import Bits
from serving.host.progress import Progress
from serving.host.user_cache import cache_folder

_VERSION = 1
# Texts are cut after so many tokens, so that one compiled step scores all of them.
_TEXT_TOKENS = 64


def shards_of(cfg: ModelConfig) -> dict[str, list[str]]:
    """The names of each shard's matrices, by shard."""
    found: dict[str, list[str]] = {}
    for name, spec in param_specs(cfg).items():
        if name.startswith("layers.") and spec.role != "vector":
            found.setdefault(".".join(name.split(".")[:3]), []).append(name)
    return found


def plan_widths(
    importance: Mapping[str, float], sizes: Mapping[str, int], mean_bits: float
) -> dict[str, Bits]:
    """Bitwidths of shards.

    Args:
      importance: of each shard.
      sizes: of each shard, in weights.
      mean_bits: most bits of a weight, on average.

    Raises:
      ConfigError: the fewest bits are more.
    """
    uniform: list[Bits] = [bits for bits in BITS if bits <= mean_bits]
    if not uniform:
        raise ConfigError(f"shards have {BITS[0]} bits at least, got {mean_bits:g} on average")
    widths: dict[str, Bits] = {}
    widths.update((shard, uniform[-1]) for shard in sizes)
    room = (mean_bits - uniform[-1]) * sum(sizes.values())
    for shard in sorted(sizes, key=lambda each: -importance[each]):
        for bits in reversed(BITS):
            more = (bits - widths[shard]) * sizes[shard]
            if 0 < more <= room:
                widths[shard] = bits
                room -= more
    return widths


def narrow_bundles(
    model: Path, mean_bits: Sequence[float], texts: Sequence[Sequence[int]], progress: Progress | None = None
) -> dict[float, Path]:
    """Bundles of a model for STI, by their mean bits of a shard's weight, made unless they are there.

    Args:
      model: a bundle.
      mean_bits: of each bundle; bits that all shards can have are the same for all.
      texts: token ids on which importance is measured, none of them counted otherwise.
      progress: called with ("Measuring shards", shards done, shards in all).

    Raises:
      ConfigError: there are no texts.
      CheckpointError: the model cannot be read.
    """
    with Bundle.open(model) as bundle:
        digest = hashlib.sha256(repr([list(each) for each in texts]).encode()).hexdigest()[:8]
        folder, key = cache_folder() / "benchmarks" / "shards", f"v{_VERSION}-{bundle.fingerprint[:16]}"
        found = {}
        for bits in mean_bits:
            uniform = bits in BITS
            found[bits] = folder / f"{key}-{bits:g}{'' if uniform else '-' + digest}.jaxllm"
        missing = {bits: path for bits, path in found.items() if not path.exists()}
        if not missing:
            return found
        shards = shards_of(bundle.cfg)
        specs = param_specs(bundle.cfg)
        floats = {
            name: np.asarray(dequantize(each, jnp.dtype(jnp.float32))) for name, each in bundle.load().items()
        }
        sizes = {shard: sum(floats[name].size for name in names) for shard, names in shards.items()}
        importance = dict.fromkeys(shards, 0.0)
        if any(bits not in BITS for bits in missing):
            importance = shard_importance(bundle.cfg, floats, texts, progress)
        folder.mkdir(parents=True, exist_ok=True)
        for bits, path in missing.items():
            widths = plan_widths(importance, sizes, bits)
            narrowed = {
                name: _narrowed(floats[name], widths[shard], contracted_axis(specs[name]))
                for shard, names in shards.items()
                for name in names
                # What has so many bits already stays.
                if bundle.layout.tensors[name].bits != widths[shard]
            }
            without = dict.fromkeys(bundle.layout.parts)
            name = f"{bundle.layout.name}, {bits:g} bits"
            rewrite_bundle(path, bundle, without, name=name, instead=narrowed)
    return found


def shard_importance(
    cfg: ModelConfig,
    params: Mapping[str, np.ndarray],
    texts: Sequence[Sequence[int]],
    progress: Progress | None = None,
) -> dict[str, float]:
    """The gain in loss (nats per token) where one shard alone has the fewest bits, by shard.

    Args:
      cfg: the model.
      params: in float32.
      texts: token ids.
      progress: see `narrow_bundles`.

    Raises:
      ConfigError: there are no texts of two tokens.
    """
    rows = [list(each[:_TEXT_TOKENS]) for each in texts if len(each) > 1]
    if not rows:
        raise ConfigError("the importance of shards is measured on texts, and there are none")
    tokens = np.zeros((len(rows), _TEXT_TOKENS), np.int32)
    counted = np.zeros((len(rows), _TEXT_TOKENS - 1), bool)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
        counted[row, : len(text) - 1] = True

    @jax.jit
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden, _ = forward(params, jnp.asarray(tokens), cfg=cfg)
        likely = jax.nn.log_softmax(logits(params, hidden[:, :-1], cfg=cfg))
        of_next = jnp.take_along_axis(likely, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(counted, of_next, 0.0)) / np.float32(counted.sum())

    placed = {name: jnp.asarray(each) for name, each in params.items()}
    whole, specs, found = float(loss(placed)), param_specs(cfg), {}
    shards = shards_of(cfg)
    for number, (shard, names) in enumerate(shards.items()):
        coarse = {
            name: dequantize(
                _narrowed(params[name], BITS[0], contracted_axis(specs[name])), jnp.dtype(jnp.float32)
            )
            for name in names
        }
        found[shard] = float(loss({**placed, **coarse})) - whole
        if progress is not None:
            progress("Measuring shards", number + 1, len(shards))
    return found


def _narrowed(value: np.ndarray, bits: Bits, axis: int) -> BlockedArray:
    return to_blocks(quantize(np.asarray(value, np.float32), bits=bits, axis=axis))
