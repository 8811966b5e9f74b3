"""Settings of integer prefill: its calibration, and the order of its subgraphs (mllm-NPU, arXiv 2407.05858,
sections 3.3 and 3.4)."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

# Orders of subgraphs on two processors (see `jaxllm.int8_prefill.schedule`).
Order = Literal["in-order", "first-ready", "equation-5", "out-of-order"]
ORDERS: tuple[Order, ...] = ("in-order", "first-ready", "equation-5", "out-of-order")
# Default of the maximum growth of the perplexity, as a share: a limit of calibration, and a requirement of
# an engine on a bundle.
MOST_LOSS = 0.01
# Number of times steps are made finer; at the last one channel in four may exceed the step.
_FINER = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowRecipe:
    """Settings that separate outliers from other activations.

    Attributes:
      most_channels: maximum share of a product's channels that exceed the step in a layer with a shadow.
      least_gain: minimum share by which each exceeding channel must make the step finer.
      pruned_share: share of the layers, the least important ones, without a shadow if the loss allows it.
    """

    most_channels: float = 0.03
    least_gain: float = 0.05
    pruned_share: float = 0.85

    def finer(self) -> "Iterator[ShadowRecipe]":
        """This recipe, then finer ones: each lets twice as many channels exceed the step, for a smaller
        gain."""
        for power in range(_FINER + 1):
            yield dataclasses.replace(
                self,
                most_channels=min(1.0, self.most_channels * 2**power),
                least_gain=self.least_gain * 0.4**power,
            )
