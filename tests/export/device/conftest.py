"""A tiny elastic model as programs, opened as a device opens them."""

import os
from pathlib import Path

import pytest

# A folder of TFLite programs, where JAX is not installed to make StableHLO ones (see
# `tests/export/test_device.py`).
FOLDER_VARIABLE = "JAXLLM_TEST_DEVICE"


@pytest.fixture(scope="session")
def folder(request):
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    return request.getfixturevalue("stablehlo")


@pytest.fixture(scope="session")
def engine(folder):
    from jaxllm.export.device.opening import open_device

    return open_device(folder)


@pytest.fixture(scope="session")
def profile(engine):
    from jaxllm.serving.elastic.profiling import measure_coarsely

    return measure_coarsely(engine)
