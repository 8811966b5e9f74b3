"""A tiny elastic model as StableHLO programs, opened as a device opens them."""

import pytest

from tests.export.models import CHUNKS, CONTEXT, write_elastic


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    pytest.importorskip("flatbuffers")
    from export.signatures import ExportPlan
    from export.stablehlo import export_stablehlo
    from export.subject import read_subject

    place = tmp_path_factory.mktemp("device")
    subject = read_subject(write_elastic(place / "tiny.jaxllm"), levels=(40,))
    plan = ExportPlan(
        context_tokens=CONTEXT, chunk_tokens=CHUNKS, verify_tokens=(8,), cache_tokens=(), levels=(40,)
    )
    export_stablehlo(subject, place / "programs", plan, platforms=("cpu",))
    return place / "programs"


@pytest.fixture(scope="session")
def engine(folder):
    from serving.device.opening import open_device

    return open_device(folder)


@pytest.fixture(scope="session")
def profile(engine):
    from serving.planning.coarse_profile import measure_coarsely

    return measure_coarsely(engine)
