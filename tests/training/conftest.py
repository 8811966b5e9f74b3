"""Files that runs start from."""

from pathlib import Path

import pytest

from tests.tiny import write_tiny_folder
from tests.training.seq2seq.tiny import write_pairs
from tests.training.tiny_runs import write_data


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all data, as small."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def pairs_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of pairs of numbers and words."""
    return write_pairs(tmp_path_factory.mktemp("pairs"))
