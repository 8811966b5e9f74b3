"""The levels of an engine: their parameters in memory, whole model and recovery adapters together."""

from collections.abc import Mapping, Sequence

from jaxllm.bundle import Bundle
from jaxllm.bundle.elastic import Recovery, read_recovery, require_level
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import WHOLE
from jaxllm.elastic.submodel import can_be_counted, counted_sub_model, shared_sub_model, whole_adapter
from jaxllm.lora import adapt, parameters_of
from jaxllm.models.parameters import Params


class Levels:
    """What the levels of a bundle are made of.

    Attributes:
      cfgs: the sub-models, by level.
      counted: whether one set of graphs serves all levels (see `jaxllm.used_units`). A level is then the
        whole model's parameters with a few numbers; else it is views of them, with graphs of its own.
    """

    def __init__(self, bundle: Bundle, levels: Sequence[int], params: Params) -> None:
        """Reads the levels' configs and adapters.

        Args:
          bundle: an elastic one, unless there are no levels.
          levels: in percent, the whole model left aside.
          params: the bundle's.

        Raises:
          ConfigError: the bundle has not all of these levels.
          BundleError: a level or its adapter is malformed.
        """
        self._whole = bundle.cfg
        self.cfgs: Mapping[int, ModelConfig] = {level: require_level(bundle, level) for level in levels}
        self.counted = bool(levels) and can_be_counted(params, bundle.cfg)
        found = {level: read_recovery(bundle, level) for level in levels}
        self._recoveries: dict[int, Recovery] = {level: each for level, each in found.items() if each}
        # Of each parameter that some level adapts, the highest rank.
        self._ranks: dict[str, int] = {}
        for each in self._recoveries.values():
            for name in parameters_of(each.adapter):
                rank = each.adapter[f"{name}.right"].shape[-2]
                self._ranks[name] = max(rank, self._ranks.get(name, 0))

    def params_of(self, level: int, whole: Params, *, rank: int = 0) -> Params:
        """The parameters of a level, 100 among them.

        Args:
          level: in percent.
          whole: the whole model's parameters, perhaps with an adapter beside them.
          rank: of that adapter.
        """
        cfg, recovery = self.cfgs.get(level, self._whole), self._recoveries.get(level)
        if not self.counted:
            views = whole if level == WHOLE else shared_sub_model(whole, cfg)
            return views if recovery is None else adapt(views, recovery.adapter, recovery.scaling)
        arrays, scaling = ({}, 1.0) if recovery is None else (recovery.adapter, recovery.scaling)
        adapted = adapt(whole, whole_adapter(self._whole, arrays, self._ranks), scaling)
        own = 0 if recovery is None else max(self._ranks.values())
        return counted_sub_model(adapted, cfg, rank=rank + own)
