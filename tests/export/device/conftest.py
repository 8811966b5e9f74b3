"""A tiny elastic model as programs, opened as a device opens them."""

import os
from pathlib import Path

import pytest

from tests.export.sizes import CHUNKS, CONTEXT

# A folder of TFLite programs, where JAX is not installed to make StableHLO ones (see
# `tests/export/test_device.py`).
FOLDER_VARIABLE = "JAXLLM_TEST_DEVICE"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    pytest.importorskip("flatbuffers")
    from jaxllm.export.signatures import ExportPlan
    from jaxllm.export.stablehlo import export_stablehlo
    from jaxllm.export.subject import read_subject
    from tests.export.models import write_elastic

    place = tmp_path_factory.mktemp("device")
    subject = read_subject(write_elastic(place / "tiny.jaxllm"), levels=(40,))
    plan = ExportPlan(
        context_tokens=CONTEXT, chunk_tokens=CHUNKS, verify_tokens=(8,), cache_tokens=(), levels=(40,)
    )
    export_stablehlo(subject, place / "programs", plan, platforms=("cpu",))
    return place / "programs"


@pytest.fixture(scope="session")
def engine(folder):
    from jaxllm.export.device.opening import open_device

    return open_device(folder)


@pytest.fixture(scope="session")
def profile(engine):
    from jaxllm.serving.elastic.profiling import measure_coarsely

    return measure_coarsely(engine)
