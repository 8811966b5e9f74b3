"""One tiny elastic model, exported once in each way, and the live engine's answers."""

import dataclasses
from pathlib import Path

import pytest

from jaxllm import Engine
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from tests.export.device_library import Library, build
from tests.export.models import CHUNKS, CONTEXT, OPTIONS, answers, write_elastic

PLAN = ExportPlan(
    context_tokens=CONTEXT, chunk_tokens=CHUNKS, verify_tokens=(8,), cache_tokens=(32,), levels=(40,)
)


@pytest.fixture(scope="session")
def elastic(tmp_path_factory):
    return write_elastic(tmp_path_factory.mktemp("export") / "tiny.jaxllm")


@pytest.fixture(scope="session")
def subject(elastic):
    return read_subject(elastic, levels=(40,))


@pytest.fixture(scope="session")
def live(elastic):
    """The live engine's answers, by level."""
    engine = Engine.open(elastic, options=OPTIONS)
    found = {level: answers(engine.at(level)) for level in (40, 100)}
    assert found[40] != found[100]
    return found


@pytest.fixture(scope="session")
def stablehlo(subject, tmp_path_factory):
    pytest.importorskip("flatbuffers")
    from jaxllm.export.stablehlo import export_stablehlo

    folder = tmp_path_factory.mktemp("programs") / "stablehlo"
    export_stablehlo(subject, folder, PLAN, platforms=("cpu",))
    return folder


@pytest.fixture(scope="session")
def tflite(subject, tmp_path_factory):
    pytest.importorskip("litert_converter")
    from jaxllm.export.tflite import export_tflite

    folder = tmp_path_factory.mktemp("programs") / "tflite"
    _, sharing = export_tflite(subject, folder, PLAN)
    return folder, sharing


@pytest.fixture(scope="session", params=["f16", "int8"])
def narrow(request, subject, tmp_path_factory):
    """A folder of programs over caches of fewer bits."""
    pytest.importorskip("litert_converter")
    from jaxllm.export.tflite import export_tflite

    folder = tmp_path_factory.mktemp("programs") / request.param
    export_tflite(subject, folder, dataclasses.replace(PLAN, cache=request.param))
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """`libjaxllm_device` for this machine."""
    litert = pytest.importorskip("ai_edge_litert")
    return build(tmp_path_factory.mktemp("native"), Path(litert.__file__).parent / "libLiteRt.so")


@pytest.fixture(scope="session")
def library(built):
    return Library(built)
