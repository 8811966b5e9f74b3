"""Lets blocks share what they compile and measure, as commands of one user do."""

import functools
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def kept_buckets(own_compilations: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled buckets and profiles are kept in a cache folder of this run's documentation, and profiles are
    measured once over."""
    from serving.planning.profiling import measure

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(shared / "documentation-cache"))
        patch.delenv("JAXLLM_BUCKETS_BYTES")
        patch.setattr("serving.service.measure", functools.partial(measure, repeats=1))
        yield
