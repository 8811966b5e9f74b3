"""One level of a model as its runner has it: parameters, and whose buckets take them."""

import functools
from typing import Any

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.submodel import CountedSubModel
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from serving.buckets.bucket import ModelShapes
from serving.buckets.parts import layer_params
from serving.buckets.store import params_digest
from serving.options import EngineOptions


class ModelLevel:
    """A model, or one of its levels.

    Attributes:
      level: in percent; 100 is the whole model.
      cfg: the model, or the level's sub-model.
      params: its parameters; those of the whole model where slicing costs nothing in a bucket.
      options: resolved options.
      weights_version: names the parameters, which `swap` changes; a cache belongs to one of them.
      bucket_level: the level whose buckets run: its own, or 100 where all levels share them.
      bucket_cfg: the model that these were lowered for, whose shapes caches have.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params | CountedSubModel,
        options: EngineOptions,
        *,
        level: int = WHOLE,
        whole: "ModelLevel | None" = None,
    ) -> None:
        """See the class; `whole` is the whole model where its buckets take this level's parameters, too.

        Raises:
          ConfigError: they do not.
        """
        self.cfg, self.params, self.options, self.level = cfg, params, options, level
        self.weights_version = (level, 0)
        self.bucket_level, self.bucket_cfg = level, cfg
        if whole is not None:
            _require_same_form(params, whole.params)
            self.bucket_level, self.bucket_cfg = whole.level, whole.cfg

    def swap(self, params: Params | CountedSubModel) -> None:
        """Takes other parameters for the same buckets.

        Raises:
          ConfigError: their names, forms, shapes or dtypes differ.
        """
        _require_same_form(params, self.params)
        self.params = params
        self.weights_version = (self.level, self.weights_version[1] + 1)

    @property
    def shapes(self) -> ModelShapes:
        """The shapes that buckets of this level are lowered from."""
        return ModelShapes.of(self.cfg, self.params, self.options)

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """Of each layer the first one that shares its buckets of one layer: whose parameters have the same
        names and forms, and of which the config says the same."""
        firsts: dict[Any, int] = {}
        cfg = self.bucket_cfg
        kinds = [
            (
                cfg.units(layer),
                cfg.attention_windows[layer],
                cfg.layer_rope(layer),
                cfg.is_sparse(layer),
                params_digest(layer_params(self.params, layer, 0)),
            )
            for layer in range(cfg.layers)
        ]
        return tuple(firsts.setdefault(kind, layer) for layer, kind in enumerate(kinds))

    @property
    def layer_kinds(self) -> list[int]:
        """The layers that `alike` names, ascending."""
        return sorted(set(self.alike))


def _require_same_form(params: Params | CountedSubModel, others: Params | CountedSubModel) -> None:
    if params_digest(params) != params_digest(others):
        raise ConfigError("the new parameters are of another form than those that buckets were made for")
