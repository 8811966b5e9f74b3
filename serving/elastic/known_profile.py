"""Finds the profile for a service's plans: that of an earlier start, or a new measurement."""

from typing import Any

from jaxllm.serving.elastic.coarse_profile import measure_coarsely
from jaxllm.serving.elastic.engine_profile import profile_path
from jaxllm.serving.elastic.prefill_times import has_both_modes
from jaxllm.serving.elastic.profile import DeviceProfile, load_profile, save_profile
from jaxllm.serving.elastic.profiling import measure
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.progress import Progress


def known_profile(
    engine: Engine[Any], *, coarse: bool = False, progress: Progress | None = None
) -> DeviceProfile:
    """The device's profile of an engine, measured and stored for later starts if there is none.

    Args:
      engine: warm engine of a whole model.
      coarse: whether a coarse profile suffices; an engine with integer and float prefill, which must be
        compared at each level, gets a full one anyway.
      progress: callback for ("profile", done, total).

    Raises:
      ConfigError: the profile cannot be read or written.
    """
    path = profile_path(engine.model.bundle, engine.options)
    known, both = load_profile(path), has_both_modes(engine)
    if (
        known is not None
        and set(engine.levels) <= set(known.levels)
        and (coarse or not known.coarse)
        and (known.prefill is not None or not both)
    ):
        return known
    if coarse and not both:
        profile = measure_coarsely(engine, progress=progress)
    else:
        profile = measure(engine, progress=progress).beside(known)
    save_profile(profile, path)
    return profile
