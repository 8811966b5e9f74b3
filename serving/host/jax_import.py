"""Imports JAX without the slow parts of its import that no command uses."""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from types import ModuleType
from typing import Any

from jaxllm.serving.host.machine import share_arenas

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
    # Before any thread of JAX allocates.
    share_arenas()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _one_blas_thread(), _deferred_modules(), _jax_packages_alone():
            import jax  # noqa: F401

        gc.freeze()
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    if _BLAS_THREADS in os.environ:
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]


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


@contextlib.contextmanager
def _deferred_modules() -> Iterator[None]:
    finder = _Deferring()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _jax_packages_alone() -> Iterator[None]:
    """Within this context `importlib.metadata.distributions` returns only packages with names that begin with
    "jax"."""
    import importlib.metadata as metadata

    every = metadata.distributions

    def of_jax(**options: Any) -> Iterable[metadata.Distribution]:
        return (each for each in every(**options) if _folder(each).startswith("jax"))

    metadata.distributions = of_jax
    try:
        yield
    finally:
        metadata.distributions = every


def _folder(package: Any) -> str:
    """The name of a package's metadata folder, which begins with the package's; "jax" if unknown."""
    path = getattr(package, "_path", None)
    return "jax" if path is None else PurePath(str(path)).name.lower()
