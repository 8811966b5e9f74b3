"""Lets blocks share what they compile and measure, as commands of one user do."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def documentation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder that pages and examples of this run share: what one has compiled, the others read."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "documentation-cache"


def _once(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Measures each case once, however often it is asked to."""

    def measured(*arguments: Any, repeats: int = 1, **more: Any) -> Any:
        del repeats
        return measure(*arguments, repeats=1, **more)

    return measured


@pytest.fixture(scope="module")
def kept_buckets(own_compilations: None, documentation_cache: Path) -> Iterator[None]:
    """Compiled buckets and profiles are kept, and profiles are measured once over."""
    from jaxllm.serving.elastic.profiling import measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(documentation_cache))
        patch.delenv("JAXLLM_BUCKETS_BYTES")
        # The command imports it when it runs.
        patch.setattr("jaxllm.serving.elastic.profiling.measure", _once(measure))
        yield
