"""Options of prefill: its mode, and the processors of integer prefill."""

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
    """How prompts are computed.

    Attributes:
      mode: "int8" in static steps with shadow outliers, which takes a calibrated bundle; "float" with
        activations as they are (which native kernels quantize by what they see); "auto" as fits each prompt:
        int8 where the bundle was calibrated, lost little enough, and the device's profile says that it is
        faster for so many tokens, else float; "" for int8 on two processors and float on one.
      most_loss: the growth of perplexity, as a share, that int8 may cost by the bundle's own account, which
        knows nothing of adapters: infinity allows those, too.
      processors: 1, or 2 for an integer and a float processor (see `serving.int8_prefill.processors`), which
        takes a calibrated bundle.
      integer_device: what the integer one of two processors is: a core of the CPU, or a GPU.
      order: of subgraphs on two processors.
      integer_bytes: most memory for weights on the integer processor; the subgraphs with most to compute go
        there. 0 for no limit.
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
                "two processors read prompts in integers: leave --processors 2 out, or --prefill float"
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
        """The mode, what "" stands for in its place."""
        return self.mode or ("int8" if self.processors > 1 else "float")
