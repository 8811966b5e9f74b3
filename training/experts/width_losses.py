"""Measures the losses of narrower experts, each loss once."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.input_files import read_text
from jaxllm.models.parameters import Params, param_specs, sparse_layers
from jaxllm.quant import dequantize, quantize
from jaxllm.training.loop.parallel import MeshShape, make_mesh, placed
from jaxllm.training.loop.run_files import write_json

_LOWEST = 2


class Measure(Protocol):
    """Measures a model on some data.

    Attributes:
      others: bitwidth of all other experts while one is lowered; 32 leaves them unchanged.
    """

    others: int

    def value(self, params: Params) -> float:
        """Measures a model with these parameters."""
        ...

    def loss(self, value: float, whole: float) -> float:
        """Returns the loss of a model with the measured `value`, relative to `whole` of the float model."""
        ...


class WidthLosses:
    """Losses by the experts' widths, stored in a file.

    Attributes:
      params: parameters of the float model, on the devices.
    """

    def __init__(
        self, cfg: ModelConfig, params: Params, measure: Measure, path: Path, mesh: Mesh | None = None
    ) -> None:
        """Reads losses of earlier measurements.

        Args:
          cfg: config of a mixture.
          params: float32 arrays.
          measure: measure of the losses.
          path: path of the file of losses.
          mesh: devices that parameters are divided over; None for the default one.
        """
        self._cfg, self._measure, self._path = cfg, measure, path
        self._layers, self._specs = sparse_layers(cfg), param_specs(cfg)
        self._known: dict[str, float] = _read_losses(path)
        self._narrow: dict[tuple[int, str], np.ndarray] = {}
        self._mesh = mesh or make_mesh(MeshShape(data=1), 1)
        self.params: Params = placed(params.items(), self._mesh)

    @property
    def shape(self) -> tuple[int, int]:
        """`(L_sparse, E)`, an encoder's layers first."""
        return len(self._layers), self._cfg.experts

    @property
    def whole(self) -> float:
        """Measured value of the float model."""
        return self._measured("whole", lambda: self.params)

    def value_of(self, bits: np.ndarray) -> float:
        """Measured value by widths `[L_sparse, E]`; 32 changes nothing."""
        bits = np.asarray(bits, np.int8)
        if np.all(bits == 32):
            return self.whole
        key = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        return self._measured(key, lambda: self._with_widths(bits))

    def loss_of(self, bits: np.ndarray) -> float:
        """The loss as a share, by widths `[L_sparse, E]`; 32 changes nothing."""
        return self._measure.loss(self.value_of(bits), self.whole)

    def importance(self, report: Callable[[int, int], None]) -> np.ndarray:
        """Returns the loss of lowering one expert to the narrowest width, relative to all at the width of
        the others (see `Measure`), `[L_sparse, E]`.

        `report` is a callback for (experts done, number of experts).
        """
        found, others = np.zeros(self.shape), np.full(self.shape, self._measure.others, np.int8)
        before = self.loss_of(others)
        for done, at in enumerate(np.ndindex(*self.shape), start=1):
            alone = others.copy()
            alone[at] = _LOWEST
            found[at] = self.loss_of(alone) - before
            report(done, found.size)
        return found

    def _measured(self, key: str, params: Callable[[], Params]) -> float:
        if key not in self._known:
            value = self._measure.value(params())
            if not math.isfinite(value):
                raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
            self._known[key] = value
            write_json(self._path, self._known)
        return self._known[key]

    def _with_widths(self, bits: np.ndarray) -> Params:
        changed: dict[str, Any] = {}
        for layer, widths in zip(self._layers, bits, strict=True):
            if np.all(widths == 32):
                continue
            for name in (each for each in self._specs if each.startswith(f"{layer}experts.")):
                stack = np.array(self.params[name], np.float32)
                for width in np.unique(widths[widths < 32]):
                    chosen = widths == width
                    stack[chosen] = self._at(int(width), name)[chosen]
                changed |= placed([(name, stack)], self._mesh)
        return {**self.params, **changed}

    def _at(self, width: int, name: str) -> np.ndarray:
        """A stack of experts at a width, dequantized."""
        if (width, name) not in self._narrow:
            value = np.asarray(self.params[name], np.float32)
            if width == 16:
                self._narrow[width, name] = np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)
            else:
                axis = contracted_axis(self._specs[name])
                stored = quantize(value, bits=width, axis=axis)  # pyright: ignore[reportArgumentType]
                self._narrow[width, name] = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)))
        return self._narrow[width, name]


def perplexity_loss(nats: float, whole: float) -> float:
    """Returns the growth of the perplexity, as a share of that of the float model, from nats per token."""
    return math.exp(nats - whole) - 1


def _read_losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        return {key: float(value) for key, value in json.loads(read_text(path)).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error
