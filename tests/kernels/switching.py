"""Switches the kernels that compute while a test runs."""

import contextlib
from collections.abc import Iterator

import pytest

from jaxllm.kernels import native

# Empty where the library is not built, or JAXLLM_KERNELS=xla keeps it out.
NATIVE = native.kernels().choices
needs_native = pytest.mark.skipif(not NATIVE, reason=f"no native kernels: {native.kernels().reason}")


def fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs traced from here on are those of a process without native kernels."""
    monkeypatch.setattr(native, "kernels", lambda: native.Kernels("xla", "a test says so"))


@contextlib.contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Native kernels of one instruction set, for graphs old and new: they choose when they run."""
    from jaxllm.kernels import _native

    before = _native.backend()
    _native.use_backend(name)
    try:
        yield
    finally:
        _native.use_backend(before)


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Native kernels on so many threads."""
    before = native.threads()
    native.set_threads(count)
    try:
        yield
    finally:
        native.set_threads(before)
