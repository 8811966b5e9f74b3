import dataclasses

import numpy as np

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.elastic.engine_profile import profile_path
from jaxllm.serving.elastic.profiling import measure, measure_together, monotonic
from jaxllm.serving.ground.options import EngineOptions
from tests.tiny import TINY, write_tiny_bundle


def test_every_level_is_measured_and_a_profile_belongs_to_its_bundle(tmp_path, compiles):
    ladder = elastic_parts(Ladder(levels=(50, 100)))
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=TINY, parts=ladder)
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), levels=(50,), buckets_bytes=0)
    engine = Engine.open(path, options=options)
    before = set(engine.runner.buckets.bucket_ms)
    seen = []
    with compiles() as count:
        profile = measure(engine, repeats=1, progress=lambda *step: seen.append(step))
    # What users ask for does not compile, so neither may what is timed for them.
    assert count() == 0
    assert (profile.levels, profile.tokens) == ((50, 100), (16, 32, 47))
    assert seen[-1] == ("profile", 12, 12)
    assert min(min(row) for row in profile.ttft_ms) > 0
    assert set(engine.runner.buckets.bucket_ms) == before
    other = Engine.open(write_tiny_bundle(tmp_path / "other.jaxllm"), options=EngineOptions(), warm_up=False)
    places = {
        profile_path(engine.model.bundle, engine.options),
        profile_path(other.model.bundle, engine.options),
        profile_path(engine.model.bundle, dataclasses.replace(engine.options, cache_dtype="bfloat16")),
    }
    assert len(places) == 3
    # Which levels are served makes no other device.
    assert profile_path(engine.model.bundle, dataclasses.replace(engine.options, levels=())) in places


def test_engines_that_are_compared_take_turns(tmp_path):
    ladder = elastic_parts(Ladder(levels=(50, 100)))
    options = EngineOptions(context_tokens=64, chunk_tokens=(16,), buckets_bytes=0)
    first = Engine.open(
        write_tiny_bundle(tmp_path / "levels.jaxllm", cfg=TINY, parts=ladder),
        options=dataclasses.replace(options, levels=(50,)),
    )
    short = dataclasses.replace(options, context_tokens=32)
    second = Engine.open(write_tiny_bundle(tmp_path / "plain.jaxllm", cfg=TINY), options=short)
    asked = []

    def noted(name, stream):
        def streamed(*prompt, **more):
            asked.append(name)
            return stream(*prompt, **more)

        return streamed

    for name, engine in (("first", first), ("second", second)):
        engine.stream = noted(name, engine.stream)
    profiles = measure_together([first, second], repeats=2)
    assert [(each.levels, each.tokens) for each in profiles] == [((50, 100), (16, 32, 47)), ((100,), (15,))]
    assert asked.count("first") == 3 * 6
    assert asked.count("second") == 3
    # Once in each of three rounds.
    assert all("second" in asked[start : start + 7] for start in (0, 7, 14))


def test_times_are_made_monotonic():
    times = np.array([[1.0, 2.0, 4.0], [3.0, 2.5, 8.0], [2.0, 6.0, 7.0]])
    found = monotonic(times)
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()
    # What is in order stays, and what is not stays in its neighbours' range.
    assert found[0].tolist() == [1.0, 2.0, 4.0]
    assert found.min() == 1.0
    assert found.max() <= 8.0
    np.testing.assert_array_equal(monotonic(found), found)
