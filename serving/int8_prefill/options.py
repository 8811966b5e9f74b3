"""Options of prefill: the mode, and the processors of integer prefill."""

import dataclasses
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import MOST_LOSS
from jaxllm.int8_prefill.schedule import ORDERS, Order

Mode = Literal["", "float", "int8", "auto"]
MODES: tuple[Mode, ...] = ("float", "int8", "auto")
IntegerDevice = Literal["cpu", "gpu"]
INTEGER_DEVICES: tuple[IntegerDevice, ...] = ("cpu", "gpu")
_MOST_PROCESSORS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Options of prefill.

    Attributes:
      mode: "int8" for static steps with shadow outliers, which requires a calibrated bundle; "float" for
        activations that are not quantized (native kernels quantize them per row); "auto" for int8 if the
        bundle is calibrated, lost at most `most_loss`, and the device's profile expects it to be faster for
        the prompt, else float; "" for int8 on two processors and float on one.
      most_loss: largest growth of perplexity, as a share, that int8 may cost by the bundle's measurement.
        That was made without adapters: infinity allows them.
      processors: 1, or 2 for an integer and a float processor (see `serving.int8_prefill.processors`), which
        requires a calibrated bundle.
      integer_device: of the integer processor of two: a core of the CPU, or a GPU.
      order: of subgraphs on two processors.
      integer_bytes: most memory for weights on the integer processor, which gets the subgraphs with most
        operations; 0 for no limit.
    """

    mode: Mode = ""
    most_loss: float = MOST_LOSS
    processors: int = 1
    integer_device: IntegerDevice = "cpu"
    order: Order = "out-of-order"
    integer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("", *MODES):
            raise ConfigError(f"prefill is one of {', '.join(MODES)}, got {self.mode!r:.80}")
        if self.mode == "float" and self.processors > 1:
            raise ConfigError(
                "two processors prefill in integers: leave --processors 2 out, or --prefill float"
            )
        if not 1 <= self.processors <= _MOST_PROCESSORS:
            raise ConfigError(f"prefill runs on 1 or {_MOST_PROCESSORS} processors, got {self.processors}")
        if self.integer_device not in INTEGER_DEVICES:
            raise ConfigError(
                f"the integer processor is one of {', '.join(INTEGER_DEVICES)}, got "
                f"{self.integer_device!r:.80}"
            )
        if self.integer_device != "cpu" and self.processors == 1:
            raise ConfigError("a GPU as integer processor takes 2 processors: the CPU is the other one")
        if not self.most_loss >= 0:
            raise ConfigError(
                f"the most loss of int8 prefill must be a share from 0 on, got {self.most_loss}"
            )
        if self.integer_bytes < 0:
            raise ConfigError(f"integer_bytes must not be negative, got {self.integer_bytes}; 0 for no limit")
        if self.order not in ORDERS:
            raise ConfigError(f"the order of subgraphs is one of {', '.join(ORDERS)}, got {self.order!r:.80}")

    @property
    def resolved_mode(self) -> Literal["float", "int8", "auto"]:
        """The mode, with "" replaced by its meaning."""
        return self.mode or ("int8" if self.processors > 1 else "float")
