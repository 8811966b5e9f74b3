"""Reads the calibrations that later commands add to a bundle."""

from collections.abc import Callable
from typing import TypeVar

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import BundleError, ConfigError

_Calibration = TypeVar("_Calibration")


def read_calibration(
    bundle: Bundle, part: str, subject: str, checked: Callable[[Bundle, Part], _Calibration]
) -> _Calibration | None:
    """The calibration in a part of a bundle; None if there is no such part.

    Args:
      bundle: it belongs to.
      part: the part's name; `jaxllm calibrate-PART` makes it.
      subject: what is calibrated, for messages.
      checked: reads the part; what it raises says that the part is malformed.

    Raises:
      BundleError: the part is corrupt, malformed, or belongs to another model.
    """
    found = bundle.load_part(part)
    if found is None:
        return None
    try:
        return checked(bundle, found)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise BundleError(
            f"{bundle.path}: its calibration of {subject} is malformed ({error!s:.300}); make it again with "
            f"`jaxllm calibrate-{part}`"
        ) from error
