"""Makes the target's bundles for STI (arXiv 2207.05022): shards of a model, each with bits by its importance.

STI keeps a model as shards whose bitwidths are chosen one by one: all get the widest that fits, and what is
left goes to the shards that matter most to accuracy. Here a shard is a layer's attention or its feed-forward
block, the smallest that the kernels of all systems compute at a bitwidth of its own; embedding and head stay
as the target has them. A shard's importance is how far the model's predictions on given texts move from the
target's when the shard alone has as few bits as all get at first.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.models import float_params
from jaxllm.bundle import Bundle, rewrite_bundle, write_bundle
from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.decoder import forward, logits
from jaxllm.models.parameters import param_specs
from jaxllm.quant import BITS, BlockedArray, dequantize, quantize, to_blocks
from jaxllm.quant.formats import Bits
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.user_cache import cache_folder

_VERSION = 2
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
      sizes: of each shard, in weights.
      mean_bits: most bits of a weight, on average.

    Raises:
      ConfigError: the fewest bits are more.
    """
    first, widths = first_bits(mean_bits), dict[str, Bits]()
    widths.update((shard, first) for shard in sizes)
    room = (mean_bits - first) * sum(sizes.values())
    for shard in sorted(sizes, key=lambda each: -importance[each]):
        for bits in reversed(BITS):
            more = (bits - widths[shard]) * sizes[shard]
            if 0 < more <= room:
                widths[shard] = bits
                room -= more
    return widths


def first_bits(mean_bits: float) -> Bits:
    """The bits that all shards get at first: the most that `mean_bits` has room for.

    Raises:
      ConfigError: the fewest bits are more.
    """
    if mean_bits < BITS[0]:
        raise ConfigError(f"shards have {BITS[0]} bits at least, got {mean_bits:g} on average")
    return max(bits for bits in BITS if bits <= mean_bits)


def narrow_bundles(
    model: Path, mean_bits: Sequence[float], texts: Sequence[Sequence[int]], progress: Progress = silent
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
    with Bundle.open(_without_planes(model)) as bundle:
        digest = hashlib.sha256(repr([list(each) for each in texts]).encode()).hexdigest()[:8]
        folder, key = cache_folder() / "benchmarks" / "shards", f"v{_VERSION}-{bundle.fingerprint[:16]}"
        # Texts count where widths are mixed.
        found = {
            bits: folder / f"{key}-{bits:g}{'' if bits in BITS else '-' + digest}.jaxllm"
            for bits in mean_bits
        }
        missing = {bits: path for bits, path in found.items() if not path.exists()}
        if not missing:
            return found
        shards = shards_of(bundle.cfg)
        specs = param_specs(bundle.cfg)
        floats = float_params(bundle)
        sizes = {shard: sum(floats[name].size for name in names) for shard, names in shards.items()}
        folder.mkdir(parents=True, exist_ok=True)
        for bits, path in missing.items():
            importance = dict.fromkeys(shards, 0.0)
            if bits not in BITS:
                importance = shard_importance(bundle.cfg, floats, texts, first_bits(bits), progress)
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


def _without_planes(model: Path) -> Path:
    """A bundle as it is; or where each weight lies in two planes, which no shard has, one of int8 weights
    with the same numbers but for rounding, made unless it is there."""
    with Bundle.open(model) as bundle:
        if bundle.layout.weights != "int8-nested":
            return model
        folder = cache_folder() / "benchmarks" / "shards"
        path = folder / f"v{_VERSION}-{bundle.fingerprint[:16]}-int8.jaxllm"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_bundle(
                path,
                cfg=bundle.cfg,
                params=float_params(bundle).items(),
                weights="int8",
                tokenizer=bundle.tokenizer_files(),
                name=bundle.layout.name,
            )
        return path


def shard_importance(
    cfg: ModelConfig,
    params: Mapping[str, np.ndarray],
    texts: Sequence[Sequence[int]],
    bits: Bits,
    progress: Progress = silent,
) -> dict[str, float]:
    """The divergence (Kullback-Leibler, nats per token) of the model's predictions where one shard alone is
    narrowed, from those of the whole model, by shard.

    Args:
      params: in float32.
      texts: token ids.

    Raises:
      ConfigError: there are no texts.
    """
    rows = [list(each[:_TEXT_TOKENS]) for each in texts if each]
    if not rows:
        raise ConfigError("the importance of shards is measured on texts, and there are none")
    tokens = np.zeros((len(rows), _TEXT_TOKENS), np.int32)
    counted = np.zeros((len(rows), _TEXT_TOKENS), bool)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
        counted[row, : len(text)] = True

    @jax.jit
    def predictions(params: dict[str, jax.Array]) -> jax.Array:
        hidden, _ = forward(params, jnp.asarray(tokens), cfg=cfg)
        return jax.nn.log_softmax(logits(params, hidden, cfg=cfg))

    @jax.jit
    def divergence(params: dict[str, jax.Array], whole: jax.Array) -> jax.Array:
        apart = jnp.sum(jnp.exp(whole) * (whole - predictions(params)), axis=-1)
        return jnp.sum(jnp.where(counted, apart, 0.0)) / np.float32(counted.sum())

    placed = {name: jnp.asarray(each) for name, each in params.items()}
    whole, specs, found = predictions(placed), param_specs(cfg), {}
    shards = shards_of(cfg)
    for number, (shard, names) in enumerate(shards.items()):
        narrowed = {
            name: dequantize(
                _narrowed(params[name], bits, contracted_axis(specs[name])), jnp.dtype(jnp.float32)
            )
            for name in names
        }
        found[shard] = float(divergence({**placed, **narrowed}, whole))
        progress("Measuring shards", number + 1, len(shards))
    return found


def _narrowed(value: np.ndarray, bits: Bits, axis: int) -> BlockedArray:
    return to_blocks(quantize(np.asarray(value, np.float32), bits=bits, axis=axis))
