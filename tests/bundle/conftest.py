"""Files to open, damage and forge."""

from pathlib import Path

import pytest

from tests.bundle.forging import MICRO, write


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """A whole bundle of the tiny model."""
    return write(tmp_path / "tiny.jaxllm")


@pytest.fixture
def micro_file(tmp_path: Path) -> Path:
    """A whole bundle that can be written a thousand times."""
    return write(tmp_path / "micro.jaxllm", cfg=MICRO)
