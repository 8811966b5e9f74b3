"""Imports JAX without the slow parts of its import that no command uses."""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from jaxllm.serving.host.allocator import STAGES, share_arenas

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
# JAX imports these, but only uses them for its own cache's lock, on other devices and in tests of paths. They
# are loaded when one of their attributes is first used.
DEFERRED = frozenset(
    {"filelock", "jaxlib.mosaic.python.mosaic_gpu", "jaxlib.mosaic.python.tpu", "unittest.mock"}
)


def import_jax() -> None:
    """Imports JAX as `import jax` does, in a tenth less time.

    - Importing JAX makes half a million objects that live as long as the process, which the collector would
      walk repeatedly.
    - NumPy's BLAS starts a thread per core, which spin for work at first; commands only multiply small arrays
      in NumPy, and never time it.
    - JAX looks for GPU plugins in the metadata of all installed packages; packages with other names need not
      be parsed.
    - Some modules are deferred (`DEFERRED`).
    """
    if "jax" in sys.modules:
        return
    STAGES.end("python")
    # Before any thread of JAX allocates.
    share_arenas()
    every = importlib.metadata.distributions

    def of_jax(**options: Any) -> Iterable[importlib.metadata.Distribution]:
        # Metadata folders begin with the names of their packages.
        for each in every(**options):
            path = getattr(each, "_path", None)
            if path is None or PurePath(str(path)).name.lower().startswith("jax"):
                yield each

    with contextlib.ExitStack() as stack:
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        if _BLAS_THREADS not in os.environ:
            os.environ[_BLAS_THREADS] = "1"
            stack.callback(os.environ.pop, _BLAS_THREADS)
        finder = _Deferring()
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        importlib.metadata.distributions = of_jax
        stack.callback(setattr, importlib.metadata, "distributions", every)
        import jax  # noqa: F401

        gc.freeze()
    STAGES.end("jax")


class _Deferring(importlib.abc.MetaPathFinder):
    """Finds the deferred modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if fullname not in DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
