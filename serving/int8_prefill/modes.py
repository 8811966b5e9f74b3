"""Decides the prefill mode of each prompt: integers, floats, or the faster one."""

import logging
import math
from collections.abc import Callable

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.runners.runner import PrefillMode

# (level, number of tokens) -> whether integer prefill is faster.
Chooser = Callable[[int, int], bool]
_log = logging.getLogger("jaxllm")


class PrefillModes:
    """The prefill modes of an engine's levels. The losses in the bundle were measured without adapters.

    Attributes:
      calibration: calibration of the bundle.
      integer_levels: levels that support integer prefill.
    """

    def __init__(
        self, options: PrefillOptions, calibration: PrefillCalibration, integer_levels: frozenset[int]
    ) -> None:
        """Modes of a model without an adapter; "auto" means floats until `choose_by`."""
        self.calibration, self.integer_levels = calibration, integer_levels
        self._options = options
        self._chooser: Chooser = lambda level, tokens: False
        self._adapted = self._warned = False

    def both(self, level: int) -> bool:
        """Whether prompts of a level are prefilled in the faster mode (see `choose_by`)."""
        return level in self.integer_levels and self._options.resolved_mode == "auto"

    def choose_by(self, chooser: Chooser) -> None:
        """Sets the function that chooses between both modes."""
        self._chooser = chooser

    def of(self, level: int, tokens: int) -> PrefillMode:
        """The prefill mode of a prompt of `tokens` tokens at a level."""
        if level not in self.integer_levels or (self._adapted and not self._any_loss):
            return "float"
        return "int8" if not self.both(level) or self._chooser(level, tokens) else "float"

    def require(self, level: int) -> None:
        """Checks that a level supports the requested mode.

        Raises:
          ConfigError: int8 is requested, and the level loses too much.
        """
        if self._options.resolved_mode == "int8" and level not in self.integer_levels:
            raise ConfigError(
                f"integer prefill was measured to lose {self.calibration.loss(level):.2%} of level {level}'s "
                f"perplexity, more than {self._options.most_loss:.2%}; choose another level, --prefill auto, "
                "or allow more (--max-prefill-loss, PrefillOptions.most_loss)"
            )

    def require_adaptable(self) -> None:
        """Checks that the requested mode supports adapters.

        Raises:
          ConfigError: int8 is requested, and `most_loss` is not infinity.
        """
        if self._options.resolved_mode == "int8" and not self._any_loss:
            raise ConfigError(
                "the loss of integer prefill was measured without an adapter; prefill prompts of an adapted "
                "model in floats (--prefill float, or auto), or allow any loss "
                "(--max-prefill-loss inf, PrefillOptions.most_loss)"
            )

    def adapt(self, adapted: bool) -> None:
        """Sets whether the model has an adapter."""
        if adapted and not self._warned and not self._any_loss:
            # Adapters may come and go with each step of a service.
            self._warned = True
            _log.warning(
                "all prompts are prefilled in floats while the model has an adapter: the loss of integer "
                "prefill with it was not measured"
            )
        self._adapted = adapted

    @property
    def _any_loss(self) -> bool:
        return math.isinf(self._options.most_loss)
