"""Adds low-rank adapters (LoRA, arXiv 2106.09685) to matrices of a model, or merges them.

An adapter is a flat dict like that of the model, with two arrays for each adapted parameter `w` `[*U, D]`:

    {w}.left  [*U, r]        {w}.right  [r, D]        (`[E, F, r]` and `[E, r, D]` for a stack of experts)

and the parameter becomes `w + scaling · left · right` (equation 3). `adapt` adds an adapter to weights of
any storage type, as arrays of a fixed rank, so that another adapter, or none (zeros), uses the same
compiled step. Files are read and written by `checkpoints/peft.py`.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import require_int
from jaxllm.models.parameters import ENCODER, Params, param_specs
from jaxllm.quant import Adapted, Weight, dequantize

Adapter = Mapping[str, jax.Array | np.ndarray]

# Names within a layer of adaptable parameters: every matrix but the embedding. For an encoder-decoder they
# apply to both sides, the "cross" ones to its decoder.
TARGETS = (
    "attn.q", "attn.k", "attn.v", "attn.o", "cross.q", "cross.k", "cross.v", "cross.o", "ffn.gate", "ffn.up",
    "ffn.down",
    "experts.gate", "experts.up", "experts.down", "router", "head",
)  # fmt: skip
MAX_RANK = 4096
_LARGEST_ALPHA = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Rank, scaling and targets of an adapter.

    Attributes:
      rank: rank r of the change to each matrix.
      alpha: the change is scaled by alpha / rank.
      targets: matrices to adapt, of `TARGETS`; those that a model lacks are left out.
      rank_stabilized: the change is scaled by alpha / sqrt(rank) instead (arXiv 2312.03732).
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = tuple(each for each in TARGETS if each.startswith(("attn", "cross", "ffn")))
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        require_int("the rank of an adapter", self.rank, 0, MAX_RANK)
        if not isinstance(self.alpha, int | float) or not abs(self.alpha) <= _LARGEST_ALPHA:
            raise ConfigError(f"alpha must be a number of at most {_LARGEST_ALPHA:g}, got {self.alpha!r:.80}")
        unknown = [each for each in self.targets if each not in TARGETS]
        if unknown or not self.targets:
            raise ConfigError(
                f"an adapter has no targets {', '.join(map(str, unknown)) or 'at all'}; choose of "
                f"{', '.join(TARGETS)}"
            )

    @property
    def scaling(self) -> float:
        """The factor of the change."""
        if not self.rank:
            return 0.0
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def adapted_parameters(cfg: ModelConfig, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a model's parameters that are among `targets`, in the model's order, without those that
    have no units in a sub-model.

    Raises:
      ConfigError: the model has none of them.
    """
    specs = param_specs(cfg).items()
    found = tuple(name for name, spec in specs if target_of(name) in targets and math.prod(spec.shape))
    if not found:
        raise ConfigError(f"this {cfg.model_type} model has none of {', '.join(targets)} to adapt")
    return found


def target_of(name: str) -> str:
    """The target of a parameter: its name without its layer, on either side of an encoder-decoder."""
    name = name.removeprefix(ENCODER)
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def adapter_shapes(cfg: ModelConfig, name: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `left` and `right` of a parameter's adapter."""
    shape = param_specs(cfg)[name].shape
    stack = shape[:1] if target_of(name).startswith("experts.") else ()
    return (*shape[:-1], rank), (*stack, rank, shape[-1])


def init_adapter(cfg: ModelConfig, lora: LoraConfig, key: jax.Array) -> dict[str, jax.Array]:
    """An initial adapter for training, whose change is zero: the factor on the input's side is random (LoRA,
    section 4.1), the one on the output's side zero."""
    names = adapted_parameters(cfg, lora.targets)
    specs, adapter = param_specs(cfg), {}
    for name, each in zip(names, jax.random.split(key, len(names)), strict=True):
        left, right = adapter_shapes(cfg, name, lora.rank)
        # The input of `to_units` has width D, that of `from_units` all units of a matrix.
        by_units = specs[name].role == "from_units"
        inputs = math.prod(left[len(right) - 2 : -1]) if by_units else right[-1]
        bound = math.sqrt(1 / inputs)

        def random(shape: tuple[int, ...], key: jax.Array = each, bound: float = bound) -> jax.Array:
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        adapter[f"{name}.left"] = random(left) if by_units else jnp.zeros(left)
        adapter[f"{name}.right"] = jnp.zeros(right) if by_units else random(right)
    return adapter


def adapt(params: Params, adapter: Adapter, scaling: float) -> dict[str, Weight]:
    """The parameters, with those that the adapter changes as `Adapted` weights.

    Raises:
      ConfigError: the adapter is for another model.
    """
    adapted = dict(params)
    for name in parameters_of(adapter):
        if name not in params:
            raise ConfigError(f"the adapter changes {name}, which this model does not have")
        left, right = adapter[f"{name}.left"], adapter[f"{name}.right"]
        base = params[name]
        fits = np.shape(left)[:-1] == tuple(base.shape[:-1]) and np.shape(right)[-1] == base.shape[-1]
        if not fits or left.shape[-1] != right.shape[-2]:
            raise ConfigError(
                f"the adapter's change to {name} is {list(left.shape)} times {list(right.shape)}, the weight "
                f"is {list(base.shape)}; it belongs to another model"
            )
        if not right.shape[-2]:
            continue
        left, ranks = left * np.asarray(scaling, left.dtype), right.ndim - 2
        if isinstance(left, np.ndarray):
            # Transposed on the host: on the device it would compile a program, which costs time and memory.
            left = jax.device_put(np.ascontiguousarray(np.moveaxis(left, -1, ranks)))
        else:
            left = jnp.moveaxis(left, -1, ranks)
        right = jax.device_put(right) if isinstance(right, np.ndarray) else right
        if isinstance(base, Adapted):
            # Two adapters are one adapter of the sum of their ranks.
            both = (jnp.concatenate(pair, axis=ranks) for pair in ((base.left, left), (base.right, right)))
            adapted[name] = Adapted(base.base, *both)
        else:
            adapted[name] = Adapted(base, left, right)
    return adapted


def summed_factors(
    name: str, shape: tuple[int, ...], adapters: Sequence[tuple[Adapter, float]], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The factors of the sum of some adapters for one matrix, on the host, as inputs of native kernels.

    Args:
      shape: shape of the whole model's weight, `[*U, D]`.
      adapters: (adapter, scaling) pairs, of the whole model or of a sub-model.
      rank: r, at least the sum of the adapters' ranks.

    Returns:
      `left` `[r, *U]` float32, the scaling included, and `right` `[r, D]` float32; zero for unused ranks, and
      for units that a sub-model lacks. Zeros use no memory until they are read.
    """
    left, right = np.zeros((rank, *shape[:-1]), np.float32), np.zeros((rank, shape[-1]), np.float32)
    filled = 0
    for adapter, scaling in adapters:
        if f"{name}.left" not in adapter:
            continue
        given = np.moveaxis(np.asarray(adapter[f"{name}.left"]), -1, 0)
        ranks = slice(filled, filled + len(given))
        left[(ranks, *map(slice, given.shape[1:]))] = given * np.float32(scaling)
        right[ranks] = adapter[f"{name}.right"]
        filled = ranks.stop
    return left, right


def merge(params: Params, adapter: Adapter, scaling: float) -> dict[str, Weight]:
    """The parameters with an adapter merged into them: dense float32 for changed ones."""
    return {
        name: dequantize(weight, jnp.float32) if isinstance(weight, Adapted) else weight
        for name, weight in adapt(params, adapter, scaling).items()
    }


def padded(cfg: ModelConfig, adapter: Adapter, targets: tuple[str, ...], rank: int) -> dict[str, np.ndarray]:
    """An adapter as arrays of a given rank for all of `targets`, zero for unchanged ones.

    All adapters then have the same shapes and use the same compiled step. The scaling is not applied.

    Raises:
      ConfigError: the adapter changes other matrices, or has a higher rank.
    """
    names = adapted_parameters(cfg, targets)
    if others := sorted({target_of(name) for name in parameters_of(adapter)} - set(targets)):
        raise ConfigError(
            f"the adapter changes {', '.join(others)}, but the engine was opened for {', '.join(targets)}; "
            "open it with these adapter_targets too"
        )
    full = {}
    for name in names:
        left, right = adapter_shapes(cfg, name, rank)
        for key, shape, axis in ((f"{name}.left", left, -1), (f"{name}.right", right, -2)):
            full[key] = np.zeros(shape, np.float32)
            if key not in adapter:
                continue
            given, expected = adapter[key], list(shape)
            expected[axis] = given.shape[axis]
            if expected[axis] > rank:
                raise ConfigError(
                    f"the adapter has rank {expected[axis]} but the engine was opened for at most {rank}; "
                    "open it with a higher adapter_rank"
                )
            if expected != list(given.shape):
                raise ConfigError(
                    f"the adapter's {key} is {list(given.shape)}, the model's is {expected}; it belongs to "
                    "another model"
                )
            full[key][tuple(map(slice, expected))] = given
    return full


def adapter_digest(adapter: Adapter, scaling: float) -> str:
    """A digest of an adapter and its scaling, in hex."""
    digest = hashlib.sha256(repr(scaling).encode())
    for name in sorted(adapter):
        part = np.ascontiguousarray(adapter[name])
        digest.update(f"{name} {part.shape} {part.dtype}".encode())
        digest.update(part.data)
    return digest.hexdigest()[:32]


def parameters_of(adapter: Adapter) -> tuple[str, ...]:
    """The names of the parameters that an adapter changes.

    Raises:
      ConfigError: one of a pair is missing.
    """
    names = dict.fromkeys(key.rpartition(".")[0] for key in adapter)
    for name in names:
        if f"{name}.left" not in adapter or f"{name}.right" not in adapter:
            raise ConfigError(f"the adapter lacks one of {name}.left and {name}.right")
    return tuple(names)
