"""Makes the parameters of all levels from the whole model's parameters and recovery adapters."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.levels import Recovery, read_recovery, release_recovery, require_level
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import can_be_counted, counted_sub_model, shared_sub_model
from jaxllm.models.features import require_feature
from jaxllm.models.layer_stack import can_be_addressed
from jaxllm.models.lora import Adapter, adapt, parameters_of, target_of
from jaxllm.models.parameters import ENCODER, Params


class Levels:
    """The levels of a bundle, and their parameters.

    Attributes:
      cfgs: the sub-models, by level.
      counted: whether all levels share buckets (see `jaxllm.kernels.native`). A level is then the whole
        model's parameters with counts of used units; else it is views of them, with buckets of its own.
    """

    def __init__(self, bundle: Bundle, levels: Sequence[int], params: Params) -> None:
        """Reads the levels' configs and adapters.

        Args:
          bundle: an elastic bundle, unless there are no levels.
          levels: levels in percent, without the whole model.
          params: parameters of the bundle.

        Raises:
          ConfigError: the bundle lacks one of the levels.
          BundleError: a level or its adapter is malformed.
        """
        self._bundle, self._whole = bundle, bundle.cfg
        if levels:
            require_feature(bundle.cfg, "levels")
        self.cfgs: Mapping[int, ModelConfig] = {level: require_level(bundle, level) for level in levels}
        self.counted = bool(levels) and can_be_counted(params, bundle.cfg)
        self._addressed = can_be_addressed(params, bundle.cfg)
        self._recoveries: dict[int, Recovery] = {}
        for level in levels:
            if found := read_recovery(bundle, level):
                self._recoveries[level] = found
            # Read only to check it until `params`: at most one is in memory at a time.
            release_recovery(bundle, level)
        # Parameter -> the maximum rank of its adapters over all levels.
        self._ranks: dict[str, int] = {}
        for each in self._recoveries.values():
            for name in parameters_of(each.adapter):
                rank = each.adapter[f"{name}.right"].shape[-2]
                self._ranks[name] = max(rank, self._ranks.get(name, 0))

    def params(self, whole: Params, adapter: Adapter, scaling: float) -> dict[int, Params]:
        """The parameters of all levels, 100 among them.

        Args:
          whole: parameters of the whole model.
          adapter: adapter of the whole model, added to each level's own; empty for none.
          scaling: factor of the adapter's product.
        """
        cfgs, found = {FULL_LEVEL: self._whole, **self.cfgs}, dict[int, Params]()
        plain = not any(target_of(name).startswith(("experts", "router")) for name in parameters_of(adapter))
        # An adapter of experts or routers is not counted.
        if self.counted or (self._addressed and not self.cfgs and plain):
            layers = ("layers.", f"{ENCODER}layers.")
            outside = {name: each for name, each in adapter.items() if not name.startswith(layers)}
            inside = {name: each for name, each in adapter.items() if name not in outside}
            whole, ranks = adapt(whole, outside, scaling), dict(self._ranks)
            for name in parameters_of(inside):
                ranks[name] = ranks.get(name, 0) + inside[f"{name}.right"].shape[-2]
            for level, cfg in cfgs.items():
                adapters: list[tuple[Adapter, float]] = [(inside, scaling)] if inside else []
                if own := self._recoveries.get(level):
                    adapters.append((own.adapter, own.scaling))
                counted = cfg if self.counted else None
                found[level] = counted_sub_model(whole, self._whole, counted, adapters=adapters, ranks=ranks)
                # The parameters have a copy.
                release_recovery(self._bundle, level)
            return found
        adapted = adapt(whole, adapter, scaling)
        for level, cfg in cfgs.items():
            views = adapted if level == FULL_LEVEL else shared_sub_model(adapted, cfg)
            own = self._recoveries.get(level)
            if own is not None:
                wide = {name: value.astype(np.float32) for name, value in own.adapter.items()}
                views = adapt(views, wide, own.scaling)
            found[level] = views
            release_recovery(self._bundle, level)
        return found
