"""Decides the prefill mode of each prompt: integers, floats, or the faster one."""

import logging
import math
from collections.abc import Callable, Sequence

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import has_channel_scales, prefill_facts, read_prefill
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.models.features import require_feature
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
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


def chosen_prefill(
    bundle: Bundle, options: EngineOptions, levels: Sequence[int], *, streamed: bool
) -> PrefillModes | None:
    """The prefill modes of a bundle's levels for options that request integer prefill; None if all prefill is
    in floats.

    If integer prefill is impossible, "int8" or two processors raise; "auto" on one processor logs a warning.
    If some levels lose too much, the log names them.

    Args:
      bundle: an open bundle.
      options: options of the engine.
      levels: its levels, including the whole model.
      streamed: whether weights are streamed.

    Raises:
      ConfigError: int8 or two processors are requested, and the bundle has no calibration or loses too much
        at every level.
      BundleError: the calibration is malformed.
    """
    asked = options.prefill
    problem = _problem(bundle, streamed=streamed)
    calibration = None if problem else read_prefill(bundle)
    # Levels with more loss than allowed; infinity if it was not measured.
    lossy: dict[int, float] = {}
    if calibration is not None:
        losses = {level: calibration.loss(level) for level in levels}
        unknown = set(levels) - set(calibration.levels)
        lossy = {
            each: loss for each, loss in losses.items() if each in unknown or not loss <= asked.most_loss
        }
    if len(lossy) == len(levels):
        worst = max(lossy, key=lambda level: lossy[level])
        problem = (
            f"integer prefill was measured to lose {lossy[worst]:.2%} of level {worst}'s perplexity, more "
            f"than {asked.most_loss:.2%}; calibrate again for less (`jaxllm calibrate prefill "
            "--max-loss SHARE`), or allow more (--max-prefill-loss, PrefillOptions.most_loss)"
        )
    if calibration is None or len(lossy) == len(levels):
        if asked.resolved_mode == "int8" or asked.processors > 1:
            instead = "leave --processors 2 out" if asked.processors > 1 else "choose --prefill float"
            raise ConfigError(f"{problem}; or {instead}")
        _log.warning("all prompts are prefilled in floats: %s", problem)
        return None
    if lossy:
        _log.warning(
            "prompts of level %s are prefilled in floats: integer prefill was measured to lose more than %s "
            "there",
            ", ".join(f"{level} ({loss:.2%})" for level, loss in sorted(lossy.items())),
            f"{asked.most_loss:.2%}",
        )
    return PrefillModes(asked, calibration, frozenset(levels) - lossy.keys())


def _problem(bundle: Bundle, *, streamed: bool) -> str:
    """Why a bundle does not support integer prefill, and the remedy; empty if it does."""
    try:
        require_feature(bundle.cfg, "integer prefill")
    except ConfigError as error:
        return str(error)
    if streamed:
        return "integer prefill requires resident weights; give more --memory"
    if bundle.layout.weights != "int8":
        return (
            f"integer prefill multiplies 8-bit weights, and {bundle.path} has {bundle.layout.weights}; "
            "prepare it with --weights int8"
        )
    if not has_channel_scales(bundle):
        return (
            f"integer prefill multiplies weights with one scale per channel, and {bundle.path} has groups; "
            "prepare the float weights with --weights int8"
        )
    if not prefill_facts(bundle):
        return (
            f"{bundle.path} was not calibrated for integer prefill; make a bundle that is with `jaxllm "
            f"calibrate prefill {bundle.path} -o OUT --text FILE`"
        )
    return ""
