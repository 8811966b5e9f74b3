"""Whether a bundle's prompts are read in integers: what was asked for, what was calibrated, what it costs."""

from collections.abc import Sequence

from jaxllm.bundle import Bundle
from jaxllm.bundle.prefill import prefill_facts, read_prefill
from jaxllm.errors import ConfigError
from jaxllm.prefill.calibration import PrefillCalibration
from jaxllm.prefill.subgraphs import require_integer_prefill
from serving.options import EngineOptions


def chosen_calibration(
    bundle: Bundle, options: EngineOptions, levels: Sequence[int], *, streamed: bool
) -> PrefillCalibration | None:
    """The calibration that prompts are read by; None to read them in floats.

    Args:
      bundle: an open one.
      options: of the engine.
      levels: that it serves, the whole model's among them.
      streamed: whether weights are read while it runs.

    Raises:
      ConfigError: int8 was asked for, and the bundle was not calibrated for it or loses too much.
      BundleError: the calibration is malformed.
    """
    asked = options.prefill
    if asked.mode == "float":
        return None
    # What was not asked for by name is not refused either.
    required = asked.mode == "int8"
    possible = prefill_facts(bundle) and not streamed and not bundle.cfg.experts
    if not required and (not possible or bundle.layout.weights != "int8"):
        return None
    # Where one processor does all the work, native kernels that look at the activations may be as fast.
    if not asked.mode and asked.processors == 1:
        return None
    require_integer_prefill(bundle.cfg)
    if streamed:
        raise ConfigError(
            "integer prefill takes all weights in memory; give more --memory, or choose --prefill float"
        )
    if bundle.layout.weights != "int8":
        raise ConfigError(
            f"integer prefill multiplies 8-bit weights, and {bundle.path} has {bundle.layout.weights}; "
            "prepare it with --weights int8, or choose --prefill float"
        )
    calibration = read_prefill(bundle)
    if calibration is None:
        raise ConfigError(
            f"{bundle.path} was not calibrated for integer prefill; make a bundle with `jaxllm calibrate "
            "--prefill`, or choose --prefill float"
        )
    losses = {level: calibration.loss(level) for level in levels}
    worst = max(losses, key=lambda level: losses[level])
    if losses[worst] > asked.most_loss:
        if not required:
            return None
        raise ConfigError(
            f"integer prefill was measured to lose {losses[worst]:.2%} of level {worst}'s perplexity, more "
            f"than {asked.most_loss:.2%}; calibrate for less loss, allow more (PrefillOptions.most_loss), or "
            "choose --prefill float"
        )
    return calibration
