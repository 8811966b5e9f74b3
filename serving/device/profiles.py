"""Finds the profile of a device for a folder of programs: that of an earlier start, or one that is measured
now.

A profile is kept in the user's cache directory under a key of the programs and of the device (processor,
cores, runtime), so that a folder that was copied from another device is measured anew.
"""

import dataclasses
import importlib.metadata
from pathlib import Path

from serving.device.opening import RUNTIMES
from serving.engine import Engine
from serving.host.machine import cpu_features, usable_cores
from serving.host.progress import Progress
from serving.host.user_cache import device_file
from serving.planning.coarse_profile import measure_coarsely
from serving.planning.profile import DeviceProfile, load_profile, save_profile
from serving.planning.profiling import measure_together
from serving.programs.model import ProgramModel

_VERSION = 1


def device_profile(
    engine: Engine[ProgramModel], *, threads: int = 0, whole: bool = False, progress: Progress | None = None
) -> DeviceProfile:
    """The profile of an engine over programs; measured and kept where there is none yet.

    Args:
      engine: warmed up.
      threads: that it computes with; 0 for all cores of this process.
      whole: every level at every length, which takes minutes; else a coarse one will do.
      progress: called with ("profile", done, total).

    Raises:
      ConfigError: the profile cannot be read or written.
    """
    path = profile_path(engine, threads=threads)
    known = load_profile(path)
    if known is not None and known.levels == engine.levels and not (whole and known.coarse):
        return known
    found = measure_together([engine], progress=progress)[0] if whole else measure_coarsely(engine)
    save_profile(found, path)
    return found


def profile_path(engine: Engine[ProgramModel], *, threads: int = 0) -> Path:
    """The path of the profile of an engine's programs on this device."""
    manifest = engine.model.executor.manifest
    facts = {
        "version": _VERSION,
        "model": manifest.model,
        "programs": {name: dataclasses.asdict(each) for name, each in sorted(manifest.files.items())},
        "runtime": importlib.metadata.version(RUNTIMES[manifest.format]),
        "device": [*cpu_features(), threads or usable_cores()],
        "processors": 1 if engine.model.stages is None else 2,
    }
    return device_file(facts, ".json")
