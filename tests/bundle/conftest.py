"""Files to open, damage and forge."""

from pathlib import Path

import pytest

from tests.bundle.forging import MICRO, write
from tests.kernels.switching import NATIVE, fall_back


@pytest.fixture
def micro_file(tmp_path: Path) -> Path:
    """A whole bundle that can be written a thousand times."""
    return write(tmp_path / "micro.jaxllm", cfg=MICRO)


@pytest.fixture(params=["native", "xla"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With native kernels where there are any, and without."""
    if request.param == "xla":
        fall_back(monkeypatch)
    elif not NATIVE:
        pytest.skip("no native kernels")
    return request.param
