"""Describes one level of a model to its runner: config, parameters, and the level whose buckets it uses."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import read_order
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.layer_stack import (
    STACK,
    LayerStack,
    StackedLayers,
    are_entries,
    by_address,
    by_stacking,
    can_be_addressed,
)
from jaxllm.models.lora import Adapter, LoraConfig
from jaxllm.models.parameters import ENCODER, Params
from jaxllm.quant import Adapted
from jaxllm.serving.buckets.bucket import Bucket, ModelShapes, layer_params, shapes_of
from jaxllm.serving.buckets.bucket_table import params_digest
from jaxllm.serving.ground.options import EngineOptions

AnyBucket = TypeVar("AnyBucket", bound=Bucket)


@dataclasses.dataclass(frozen=True, eq=False)
class LevelWeights:
    """Parameters of a level, ready to be applied.

    Attributes:
      weights: parameters by name (see `ModelLevel`).
      encoder: parameters of the encoder as inputs of buckets; None if there is none.
      version: (level, number), unique among the parameters of the level: identifies the weights that
        computed a cache.
    """

    weights: Params
    params: Params
    encoder: Params | None
    version: tuple[int, int]


class ModelLevel:
    """A model, or one of its levels.

    Attributes:
      level: level in percent; 100 is the whole model.
      weights: its parameters by name; those of the whole model if its buckets slice them without a copy.
      params: `weights` as inputs of buckets: by address where native kernels read them so, stacked where
        their arrays are entries of stacks.
      encoder: parameters of its encoder, likewise; None if it has none.
      weights_version: version of the current parameters (see `LevelWeights.version`).
      bucket_level: the level of its buckets: its own, or 100 if all levels share them.
      bucket_cfg: config of the model that the buckets were lowered for, which determines the shapes of
        caches.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        weights: Params,
        options: EngineOptions,
        *,
        level: int = FULL_LEVEL,
        whole: "ModelLevel | None" = None,
    ) -> None:
        """See the class; `whole` is the whole model if its buckets serve this level, too.

        Raises:
          ConfigError: the parameters have another form than those of `whole`.
        """
        self.cfg, self.options, self.level = cfg, options, level
        self._numbers = itertools.count(1)
        self.weights_version = (level, 0)
        self.bucket_level, self.bucket_cfg = level, cfg
        if whole is not None:
            self.bucket_level, self.bucket_cfg = whole.level, whole.cfg
        self.weights, self.params = weights, self._for_buckets(weights)
        self.encoder = self._of_encoder(weights)
        if whole is not None:
            _require_same_form(self.params, whole.params)

    @property
    def current(self) -> LevelWeights:
        """The current parameters, to be restored after others."""
        return LevelWeights(self.weights, self.params, self.encoder, self.weights_version)

    def prepared(self, weights: Params) -> LevelWeights:
        """Other parameters, ready for `put`.

        Raises:
          ConfigError: names, structure, shapes or dtypes differ.
        """
        params, encoder = self._for_buckets(weights), self._of_encoder(weights)
        _require_same_form(params, self.params)
        if encoder is not None and self.encoder is not None:
            _require_same_form(encoder, self.encoder)
        return LevelWeights(weights, params, encoder, (self.level, next(self._numbers)))

    def put(self, prepared: LevelWeights) -> None:
        """Replaces the parameters; the buckets stay. Takes no time, and may be repeated."""
        self.weights, self.params, self.encoder = prepared.weights, prepared.params, prepared.encoder
        self.weights_version = prepared.version

    @property
    def shapes(self) -> ModelShapes:
        """The shapes from which buckets of this level are lowered."""
        by_name, encoder = shapes_of(self.weights), shapes_of(self.encoder)
        return ModelShapes(self.cfg, shapes_of(self.params), self.options, by_name, encoder)

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """Per layer, the first layer that shares its buckets: with the same names and shapes of parameters
        and the same config."""
        stack: Any = self.params.get(STACK)
        if isinstance(stack, LayerStack | StackedLayers):
            return stack.alike
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

    def bucket(self, family: type[AnyBucket], **fields: Any) -> AnyBucket:
        """A bucket of this level's; of a `layer`, that of all layers like it."""
        if "layer" in fields:
            fields["layer"] = self.alike[fields["layer"]]
        return family(level=self.bucket_level, **fields)

    def _of_encoder(self, weights: Params) -> Params | None:
        cfg = self.bucket_cfg.encoder
        if cfg is None:
            return None
        from jaxllm.models.encoder_decoder import encoder_params

        own = encoder_params(weights)
        return by_address(own, cfg) if can_be_addressed(own, cfg) else own

    def _for_buckets(self, weights: Params) -> Params:
        if self.cfg.encoder is not None:
            # Decode buckets have no unused inputs.
            weights = {name: each for name, each in weights.items() if not name.startswith(ENCODER)}
        if can_be_addressed(weights, self.bucket_cfg):
            return by_address(weights, self.bucket_cfg)
        if are_entries(weights.values()):
            return by_stacking(weights, self.bucket_cfg)
        return weights

    @property
    def layer_kinds(self) -> list[int]:
        """The distinct layers of `alike`, ascending."""
        return sorted(set(self.alike))


def _require_same_form(params: Params, others: Params) -> None:
    if params_digest(params) != params_digest(others):
        raise ConfigError("the new parameters are of another form than those that buckets were made for")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """The parameters of all levels with an adapter, or without one, ready to be applied.

    Attributes:
      digest: hex digest of the adapter and its scaling; empty for none.
      levels: level in percent -> its parameters.
      size_bytes: size of the adapter's factors at all levels; weights are shared.
    """

    digest: str
    levels: Mapping[int, LevelWeights]
    size_bytes: int = 0

    @property
    def versions(self) -> frozenset[tuple[int, int]]:
        """`Runner.weights_version` of each level."""
        return frozenset(each.version for each in self.levels.values())


def read_adapter_of(bundle: Bundle, folder: str | Path) -> tuple[LoraConfig, Adapter]:
    """Reads an adapter of the bundle's original model, and orders its units like the bundle's.

    Raises:
      CheckpointError, ConfigError: the folder is missing, corrupt or of another model.
    """
    # Imported here: the import is slow, and most models have no adapter.
    from jaxllm.checkpoints.peft import read_adapter

    lora, adapter = read_adapter(Path(folder), bundle.cfg)
    order = read_order(bundle)
    if order is None:
        return lora, adapter
    from jaxllm.elastic.units import reorder_adapter

    return lora, reorder_adapter(adapter, order)


def rank_of(adapter: Adapter) -> int:
    """The highest rank of an adapter's changes."""
    return max(part.shape[-2] for name, part in adapter.items() if name.endswith(".right"))


def factor_bytes(levels: Iterable[Params]) -> int:
    """Bytes of the factors of adapters in the parameters of some levels, each array once."""
    arrays = {
        id(factor): factor.nbytes
        for params in levels
        for weight in params.values()
        if isinstance(weight, Adapted)
        for factor in (weight.left, weight.right)
    }
    return sum(arrays.values())


def require_nested(bundle: Bundle) -> None:
    """Raises ConfigError unless a bundle has high planes that can be read separately for drafts."""
    weights = bundle.layout.weights
    if weights != "int8-nested" or not bundle.read_in_place:
        reason = f"it has {weights} weights" if weights != "int8-nested" else "there are no native kernels"
        raise ConfigError(
            f"{bundle.path} cannot draft or predict by its high planes, because {reason}; prepare the model "
            "with --weights int8-nested, on a CPU with native kernels, or draft with a model, level or ngram"
        )
