"""Settings of the tests of benchmarks."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def _quick(quick_compilations: None) -> None:
    """Benchmarks must run here, not be fast."""
