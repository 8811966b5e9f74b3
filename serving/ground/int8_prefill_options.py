"""Options of prefill: its mode, and the processors of integer prefill."""

import dataclasses
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import MOST_LOSS, Order
from jaxllm.options import check_options, option

Mode = Literal["", "float", "int8", "auto"]
MODES: tuple[Mode, ...] = ("float", "int8", "auto")
IntegerDevice = Literal["cpu", "gpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Options of prefill.

    Attributes:
      mode: "int8" for static steps with shadow outliers, which requires a calibrated bundle; "float" for
        activations that are not quantized (native kernels quantize them per row); "auto" for int8 if the
        bundle is calibrated, lost at most `most_loss`, and the device's profile expects it to be faster for
        the prompt, else float; "" for int8 on two processors and float on one.
      most_loss: maximum increase of perplexity by int8, as a share, by the bundle's measurement, which was
        made without adapters; infinity allows adapters.
      processors: 1, or 2 for an integer and a float processor (see
        `jaxllm.serving.int8_prefill.processors`); 2 requires a calibrated bundle.
      integer_device: device of the integer processor of two: a core of the CPU, or a GPU.
      order: order of subgraphs on two processors.
      integer_bytes: memory limit of weights on the integer processor, which gets the subgraphs with the
        most operations; 0 for no limit.
    """

    mode: Mode = ""
    most_loss: float = option(MOST_LOSS, low=0)
    processors: int = option(1, low=1, high=2)
    integer_device: IntegerDevice = "cpu"
    order: Order = "out-of-order"
    integer_bytes: int = option(0, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.mode == "float" and self.processors > 1:
            raise ConfigError(
                "two processors prefill in integers: leave --processors 2 out, or --prefill float"
            )
        if self.integer_device != "cpu" and self.processors == 1:
            raise ConfigError("a GPU as integer processor takes 2 processors: the CPU is the other one")

    @property
    def resolved_mode(self) -> Literal["float", "int8", "auto"]:
        """The mode, with "" resolved."""
        return self.mode or ("int8" if self.processors > 1 else "float")
