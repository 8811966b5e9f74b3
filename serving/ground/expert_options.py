"""Options of the expert buffer: eviction and prediction."""

import dataclasses
from typing import Literal, get_args

from jaxllm.options import check_options, option

Eviction = Literal["frequency-nearness", "fifo", "lru", "lfu", "lfru"]
Predictor = Literal["router", "paths", "tokens", "frequency", "none"]
PREDICTORS: tuple[str, ...] = get_args(Predictor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of eviction and prediction of experts that do not all fit into memory.

    Attributes:
      eviction: name of the policy in `jaxllm.experts.prediction.POLICIES`.
      predictor: predictor of experts before their router has run: "router" applies the next layers' routers
        to this layer's hidden states, "paths" uses the experts of the two layers before (EdgeMoE), "tokens"
        the tokens of the pass (including drafted ones), "frequency" the most visited experts, "none"
        predicts none. For the first layers of a pass "router" predicts as "tokens" does.
      layers_ahead: number of layers for which experts are predicted.
      loss: maximum share of a token's mixture, in weights of its experts, to compute with high planes only:
        its least probable experts (HOBBIT's idea), whichever planes are in memory. Applies to nested
        experts that are read from storage; 0 is exact.
    """

    eviction: Eviction = "frequency-nearness"
    predictor: Predictor = "router"
    layers_ahead: int = option(2, low=1)
    loss: float = option(0.0, low=0, high=1)

    def __post_init__(self) -> None:
        check_options(self)
