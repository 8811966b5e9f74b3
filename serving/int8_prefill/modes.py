"""The prefill modes of a model's levels: integers, floats, or whichever is faster for a prompt."""

import logging
import math
from collections.abc import Callable
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import PrefillCalibration
from serving.int8_prefill.options import PrefillOptions

PrefillMode = Literal["int8", "float"]
# Of a level and a number of tokens, whether integers are faster.
Chooser = Callable[[int, int], bool]
_log = logging.getLogger("jaxllm")


class PrefillModes:
    """The modes of an engine's levels; what the bundle states of losses knows no adapter.

    Attributes:
      calibration: of the bundle.
      integer_levels: whose prompts may be computed in integers.
    """

    def __init__(
        self, options: PrefillOptions, calibration: PrefillCalibration, integer_levels: frozenset[int]
    ) -> None:
        """Of a model without an adapter; where both modes are possible, it is floats until `choose_by`."""
        self.calibration, self.integer_levels = calibration, integer_levels
        self._options = options
        self._chooser: Chooser = lambda level, tokens: False
        self._adapted = False

    def both(self, level: int) -> bool:
        """Whether prompts of a level are computed in the mode that is faster (see `choose_by`)."""
        return level in self.integer_levels and self._options.resolved_mode == "auto"

    def choose_by(self, chooser: Chooser) -> None:
        """Says which of both modes computes prompts."""
        self._chooser = chooser

    def of(self, level: int, tokens: int) -> PrefillMode:
        """The mode of a prompt of so many tokens at a level."""
        if level not in self.integer_levels or (self._adapted and not self._any_loss):
            return "float"
        return "int8" if not self.both(level) or self._chooser(level, tokens) else "float"

    def require(self, level: int) -> None:
        """Refuses to be a level that cannot be read as was asked for by name.

        Raises:
          ConfigError: integers were asked for, and it loses too much.
        """
        if self._options.resolved_mode == "int8" and level not in self.integer_levels:
            raise ConfigError(
                f"integer prefill was measured to lose {self.calibration.loss(level):.2%} of level {level}'s "
                f"perplexity, more than {self._options.most_loss:.2%}; choose another level, --prefill auto, "
                "or allow more (--max-prefill-loss, PrefillOptions.most_loss)"
            )

    def require_adaptable(self) -> None:
        """Refuses adapters where integers were asked for by name.

        Raises:
          ConfigError: they were, and not any loss is allowed.
        """
        if self._options.resolved_mode == "int8" and not self._any_loss:
            raise ConfigError(
                "what integer prefill loses was measured without an adapter; read prompts of an adapted "
                "model in floats (--prefill float, or auto), or allow any loss "
                "(--max-prefill-loss inf, PrefillOptions.most_loss)"
            )

    def adapt(self, adapted: bool) -> None:
        """Says whether there is an adapter on the model."""
        if adapted and not self._adapted and not self._any_loss:
            _log.warning(
                "all prompts are read in floats while the model has an adapter: what integer prefill loses "
                "with it was not measured"
            )
        self._adapted = adapted

    @property
    def _any_loss(self) -> bool:
        return math.isinf(self._options.most_loss)
