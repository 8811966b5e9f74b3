"""Lowers GPU kernels on machines without a GPU."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def lowers_for_gpus() -> Iterator[None]:
    """JAX 0.12 asks which GPU it lowers Pallas' kernels for, and warns that their backend will go."""
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:  # An older JAX lowers for any.
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        known = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
        patch.setitem(gpu_info.registry, "cpu", lambda: known)
        yield
