"""Starts of a service, counted rather than timed: what is on disk is neither compiled nor measured again."""

import pytest

from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.elastic import profiling
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.opening import open_service
from jaxllm.serving.server.service_options import ServerOptions
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.usefixtures("own_compilations")


@pytest.fixture
def options(tmp_path, monkeypatch):
    # Graphs are kept, as users have it.
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES")
    parts = elastic_parts(Ladder(levels=(50, 100)))
    model = write_tiny_bundle(tmp_path / "tiny.jaxllm", "int8", parts=parts)
    return ServerOptions(model=str(model), context_tokens=64, batch_rows=(2,), contexts=tmp_path / "kept")


def test_a_second_start_compiles_and_measures_nothing(options, compiles, monkeypatch):
    first = open_service(options).service
    assert first.profile.coarse
    built = first.engine.runner.buckets.bucket_ms
    assert built
    first.close()
    for name in ("measure", "measure_coarsely"):
        monkeypatch.setattr(profiling, name, None)
    with compiles() as count:
        again = open_service(options).service
        assert again.profile == first.profile
        # The first answer and the first embedding of each length, too.
        assert again.engine.stream("hello", level=50).result().tokens
        for tokens in (1, 20, 64):
            embedding = Scorer(again.engine.runner).embedding([3] * tokens)
            while embedding.step():
                pass
        assert count() == 0
    assert set(again.engine.runner.buckets.bucket_ms) == set(built)
    again.close()
