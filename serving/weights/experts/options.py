"""Options of experts that do not all fit into memory: eviction and prediction."""

import dataclasses

from jaxllm.errors import ConfigError
from jaxllm.experts.eviction import eviction_policy

PREDICTORS = ("router", "paths", "tokens", "frequency", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How experts are kept and foreseen where there is too little memory for all.

    Attributes:
      eviction: who leaves, a name of `jaxllm.experts.eviction.POLICIES`.
      predictor: who comes before the router has spoken: "router" by the next router on this layer's hidden
        states, "paths" by the experts of the layers before (EdgeMoE), "tokens" by what is read (a draft's
        tokens among it), "frequency" the most frequent ones, "none" nobody. Of a pass's first layer, and
        of those beyond the next, which no router sees, "router" says what "tokens" does.
      layers_ahead: for how many layers experts are foreseen.
    """

    eviction: str = "frequency-nearness"
    predictor: str = "router"
    layers_ahead: int = 2

    def __post_init__(self) -> None:
        eviction_policy(self.eviction)
        if self.predictor not in PREDICTORS:
            raise ConfigError(f"predictor must be one of {', '.join(PREDICTORS)}, got {self.predictor!r:.80}")
        if not isinstance(self.layers_ahead, int) or self.layers_ahead < 1:
            raise ConfigError(f"layers_ahead must be at least 1, got {self.layers_ahead!r:.80}")
