"""Looks up the parameters of one layer by their names within it, and applies the final norm."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.kernels.native import Operand, TableArray
from jaxllm.kernels.native_call import PARAMETER, UsedUnits, used_units, value
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import Norm, normalize
from jaxllm.quant import Weight


class LayerParams:
    """The parameters under one prefix."""

    def __init__(
        self,
        params: Mapping[str, Weight | Operand],
        prefix: str,
        used: tuple[UsedUnits, UsedUnits] | None = None,
    ) -> None:
        self._params, self._prefix, self._used = params, prefix, used

    def __getitem__(self, name: str) -> Weight:
        return self._params[self._prefix + name]  # pyright: ignore[reportReturnType]: of a router, an operand

    @property
    def used(self) -> tuple[UsedUnits | None, UsedUnits | None]:
        """The used kv groups and the used neurons, None if all are used (see `jaxllm.kernels.native`)."""
        return used_units(self.operand(PARAMETER)) if self._used is None else self._used

    def using(self, used: tuple[UsedUnits, UsedUnits]) -> "LayerParams":
        """The same parameters with other used units."""
        return LayerParams(self._params, self._prefix, used)

    def operand(self, name: str) -> Operand | None:
        """A vector or small matrix parameter as input of native kernels; None if the model does not have
        it."""
        found = self._params.get(self._prefix + name)
        assert found is None or isinstance(found, jax.Array | np.ndarray | TableArray)
        return found

    def vector(self, name: str) -> jax.Array | None:
        """A vector parameter, such as a bias; None if the model does not have it."""
        found = self.operand(name)
        return None if found is None else value(found)

    def pre_norm(self, name: str, cfg: ModelConfig) -> Norm | None:
        """`norm` of a block's input; None if the model's blocks read their input unnormalized."""
        return self.norm(name, cfg) if cfg.pre_norms else None

    def norm(self, name: str, cfg: ModelConfig) -> Norm:
        """A norm's scale, and its bias if it has one."""
        scale = self.operand(f"{name}.scale")
        assert scale is not None
        return Norm(scale=scale, bias=self.operand(f"{name}.bias"), eps=cfg.norm_eps)


def final_normed(params: Params, x: jax.Array, *, cfg: ModelConfig) -> jax.Array:
    """The outputs of an encoder or a decoder from its last layer's: after the final norm, if there is one."""
    return normalize(x, LayerParams(params, "").norm("final_norm", cfg)) if cfg.final_norm else x


def with_room(cfg: ModelConfig, tokens: int) -> ModelConfig:
    """The decoder with an expert capacity of at least `tokens`: tokens of a context that are recomputed
    together had come a few at a time, within the capacity."""
    most = max(cfg.expert_capacity, tokens)
    return dataclasses.replace(cfg, expert_capacity=most) if cfg.expert_capacity else cfg
