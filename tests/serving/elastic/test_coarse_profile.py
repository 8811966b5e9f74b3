import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.elastic import coarse_profile
from jaxllm.serving.elastic import known_profile as known
from jaxllm.serving.elastic.coarse_profile import measure_coarsely
from jaxllm.serving.elastic.engine_profile import profile_path
from jaxllm.serving.elastic.known_profile import known_profile
from jaxllm.serving.elastic.profile import load_profile
from jaxllm.serving.ground.options import EngineOptions
from tests.tiny import TINY, write_tiny_bundle


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    parts = elastic_parts(Ladder(levels=(50, 75, 100)))
    path = write_tiny_bundle(tmp_path_factory.mktemp("coarse") / "tiny.jaxllm", cfg=TINY, parts=parts)
    options = EngineOptions(context_tokens=128, chunk_tokens=(16,), levels=(50, 75), buckets_bytes=0)
    return Engine.open(path, options=options)


def test_levels_between_the_measured_ones_lie_on_a_line(engine, compiles, monkeypatch):
    monkeypatch.setattr(coarse_profile, "LENGTHS", (16, 64, 512))
    seen = []
    with compiles() as count:
        profile = measure_coarsely(engine, progress=lambda *step: seen.append(step))
    assert count() == 0
    assert (profile.levels, profile.tokens, profile.coarse) == ((50, 75, 100), (16, 64), True)
    for rows in (profile.ttft_ms, profile.tpot_ms):
        for small, middle, whole in zip(*rows, strict=True):
            assert 0 < small <= whole
            assert middle == pytest.approx((small + whole) / 2)
    assert seen == [("profile", 1, 2), ("profile", 2, 2)]
    # The planner asks for longer prompts, too.
    assert profile.ttft(75, 111) >= profile.ttft(75, 64)


def test_a_slow_device_is_measured_at_two_lengths(engine, monkeypatch):
    monkeypatch.setattr(coarse_profile, "LENGTHS", (16, 32, 64))
    times = iter(range(0, 1000, 20))
    assert measure_coarsely(engine, clock=lambda: next(times)).tokens == (16, 32)
    assert measure_coarsely(engine, clock=lambda: 0.0).tokens == (16, 32, 64)


def test_a_coarse_profile_is_measured_once_and_replaced_by_a_whole_one(engine, monkeypatch):
    counted = []

    def counting(measure):
        def measured(*arguments, **more):
            counted.append(measure.__name__)
            return measure(*arguments, **more)

        return measured

    monkeypatch.setattr(known, "measure", counting(known.measure))
    monkeypatch.setattr(known, "measure_coarsely", counting(known.measure_coarsely))
    first = known_profile(engine, coarse=True)
    assert known_profile(engine, coarse=True) == first
    assert load_profile(profile_path(engine.model.bundle, engine.options)) == first
    whole = known_profile(engine)
    assert not whole.coarse
    assert whole.tokens == (16, 32, 64, 111)
    assert known_profile(engine, coarse=True) == known_profile(engine) == whole
    assert counted == ["measure_coarsely", "measure"]
