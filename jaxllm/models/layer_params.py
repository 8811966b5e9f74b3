"""Looks up the parameters of one layer by their names within it."""

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kernels.used_units import PARAMETER
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import Norm
from jaxllm.quant import Weight


class LayerParams:
    """The parameters under one prefix."""

    def __init__(self, params: Params, prefix: str) -> None:
        self._params, self._prefix = params, prefix

    def __getitem__(self, name: str) -> Weight:
        return self._params[self._prefix + name]

    @property
    def counts(self) -> jax.Array | None:
        """Counts of used units of all layers, where units are used in part (see
        `jaxllm.kernels.used_units`)."""
        found = self._params.get(PARAMETER)
        assert found is None or isinstance(found, jax.Array | np.ndarray)
        return found

    def vector(self, name: str) -> jax.Array | None:
        """A parameter that is a vector, such as a bias; None if the model does not have it."""
        found = self._params.get(self._prefix + name)
        assert found is None or isinstance(found, jax.Array | np.ndarray)
        return found

    def norm(self, name: str, cfg: ModelConfig) -> Norm:
        """A norm's scale, and its bias if it has one."""
        scale = self.vector(f"{name}.scale")
        assert scale is not None
        return Norm(scale=scale, bias=self.vector(f"{name}.bias"), eps=cfg.norm_eps)
