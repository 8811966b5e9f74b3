"""Finds the profile that a service plans by: that of an earlier start, or one that is measured now."""

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
    """The device's profile of an engine. Where there is none yet it is measured, and kept for later starts.

    Args:
      engine: warmed up, a whole model's.
      coarse: a coarse one will do; an engine with integer and float prefill, which must be compared at each
        level, gets a whole one all the same.
      progress: called with ("profile", done, total).

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
