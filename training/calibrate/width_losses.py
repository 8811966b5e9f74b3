"""Measures by how much the perplexity of a text grows with narrower experts; every loss once."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.experts.activation_paths import PathCounts, count_paths
from jaxllm.experts.token_experts import TokenExperts, count_tokens
from jaxllm.files.input_files import read_text
from jaxllm.models import decoder
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import dequantize, quantize
from training.data.packing import Batch
from training.loop.losses import Outputs, next_token_losses
from training.loop.parallel import MeshShape, make_mesh, place_rows
from training.loop.placing import placed
from training.loop.run_files import write_json

_PARTS = ("gate", "up", "down")


_LOWEST = 2


class WidthLosses:
    """Losses of a text by the experts' widths, kept in a file.

    Attributes:
      tokens: predicted ones.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        batches: Sequence[Batch],
        path: Path,
        mesh: Mesh | None = None,
    ) -> None:
        """Reads the losses that were measured before.

        Args:
          cfg: a mixture.
          params: as floats of 32 bits.
          batches: the text.
          path: of the file of losses.
          mesh: the devices, over which rows and parameters are divided; None: the default one.
        """
        self._cfg, self._batches, self._path = cfg, batches, path
        self.tokens = int(sum((batch.weights > 0).sum() for batch in batches))
        self._layers = [layer for layer in range(cfg.layers) if cfg.is_sparse(layer)]
        self._known: dict[str, float] = _read_losses(path)
        self._narrow: dict[tuple[int, str], np.ndarray] = {}
        self._mesh = mesh or make_mesh(MeshShape(data=1), 1)
        self._params: Params = placed(params.items(), self._mesh)
        self._nats = nats_step(cfg, self._mesh)

    @property
    def shape(self) -> tuple[int, int]:
        """`(L_sparse, E)`."""
        return len(self._layers), self._cfg.experts

    @property
    def whole(self) -> float:
        """Nats per token of the float model."""
        return self._measured("whole", lambda: self._params)

    def loss_of(self, bits: np.ndarray) -> float:
        """The growth of the perplexity, as a share, by widths `[L_sparse, E]`; 32 changes nothing."""
        bits = np.asarray(bits, np.int8)
        key = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        return math.exp(self._measured(key, lambda: self._with_widths(bits)) - self.whole) - 1

    def importance(self, report: Callable[[int, int], None]) -> np.ndarray:
        """The loss with one expert alone at the narrowest width, `[L_sparse, E]`.

        `report` is called with (experts done, experts in all).
        """
        found = np.zeros(self.shape)
        for done, at in enumerate(np.ndindex(*self.shape), start=1):
            alone = np.full(self.shape, 32, np.int8)
            alone[at] = _LOWEST
            found[at] = self.loss_of(alone)
            report(done, found.size)
        return found

    def paths(self) -> tuple[PathCounts, TokenExperts, np.ndarray]:
        """The activation paths of the text, the experts of its tokens, and of each layer the experts' shares
        `[L_sparse, E]`."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        route = jax.jit(functools.partial(_visited, self._cfg), out_shardings=everywhere)
        read = [each.weights > 0 for each in self._batches]
        each_route = (np.asarray(self._on_rows(route, self._params, each)) for each in self._batches)
        ids = np.concatenate([found[:, where] for found, where in zip(each_route, read, strict=True)], axis=1)
        tokens = [np.asarray(each.tokens)[where] for each, where in zip(self._batches, read, strict=True)]
        counts = count_paths(ids, self._cfg.experts)
        of_tokens = count_tokens(ids, np.concatenate(tokens), self._cfg.experts)
        return counts, of_tokens, counts.alone / counts.alone.sum(-1, keepdims=True)

    def _measured(self, key: str, params: Callable[[], Params]) -> float:
        if key not in self._known:
            params_now = params()
            total = sum(float(self._on_rows(self._nats, params_now, batch)) for batch in self._batches)
            if not math.isfinite(total):
                raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
            self._known[key] = total / self.tokens
            write_json(self._path, self._known)
        return self._known[key]

    def _on_rows(self, step: Callable[..., jax.Array], params: Params, batch: Batch) -> jax.Array:
        """Runs a step on a batch whose rows are divided over the mesh."""
        with jax.set_mesh(self._mesh):
            return step(params, jax.tree.map(lambda part: part[0], place_rows(batch, self._mesh, 1)))

    def _with_widths(self, bits: np.ndarray) -> Params:
        changed: dict[str, Any] = {}
        for layer, widths in zip(self._layers, bits, strict=True):
            if np.all(widths == 32):
                continue
            for part in _PARTS:
                name = f"layers.{layer}.experts.{part}"
                stack = np.array(self._params[name], np.float32)
                for width in np.unique(widths[widths < 32]):
                    chosen = widths == width
                    stack[chosen] = self._at(int(width), name)[chosen]
                changed |= placed([(name, stack)], self._mesh)
        return {**self._params, **changed}

    def _at(self, width: int, name: str) -> np.ndarray:
        """A stack of experts at a width, dequantized."""
        if (width, name) not in self._narrow:
            value = np.asarray(self._params[name], np.float32)
            if width == 16:
                self._narrow[width, name] = np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)
            else:
                axis = contracted_axis(param_specs(self._cfg)[name])
                stored = quantize(value, bits=width, axis=axis)  # pyright: ignore[reportArgumentType]
                self._narrow[width, name] = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)))
        return self._narrow[width, name]


def _read_losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        return {key: float(value) for key, value in json.loads(read_text(path)).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error


def nats_step(cfg: ModelConfig, mesh: Mesh) -> Callable[[Params, Batch], jax.Array]:
    """The compiled step of (parameters, batch), both on the mesh, to the loss summed over the targets."""
    return jax.jit(functools.partial(_nats, cfg), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _nats(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The loss of a batch, summed over its targets."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, differentiable=False)
    logits = decoder.logits(params, hidden, cfg=cfg)
    losses = next_token_losses(Outputs(params, hidden, logits, None, cfg), batch)
    return jnp.sum(jnp.where(batch.weights > 0, losses, jnp.zeros_like(losses)))


def _visited(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The experts `[L_sparse, B, T, k]` that tokens visit."""
    inputs = params, batch.tokens, batch.starts
    _, routing = decoder.forward_documents_with_routing(*inputs, cfg=cfg, differentiable=False)
    return routing.ids
