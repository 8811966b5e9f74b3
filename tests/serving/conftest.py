"""One tiny engine for the whole room: compiling it is what costs."""

import pytest

from jaxllm import Engine, EngineOptions
from tests.tiny import write_tiny_bundle

OPTIONS = EngineOptions(context_tokens=128, chunk_tokens=(16, 32), cache_tokens=(32, 64, 128), decode_block=8)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("engine") / "tiny.jaxllm"
    write_tiny_bundle(path)
    return path


@pytest.fixture(scope="session")
def engine(tiny_bundle):
    return Engine.open(tiny_bundle, options=OPTIONS)
