import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.elastic.compression import input_rows, marked
from jaxllm.elastic.ladder import Ladder
from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError
from jaxllm.models.tiny_lm import forward_both
from jaxllm.serving.elastic import profiling, tiny_lm
from jaxllm.serving.elastic.profile import DeviceProfile, Energy, load_profile, save_profile
from jaxllm.serving.elastic.profiling import known_profile, measure, measure_coarsely, monotonic, profile_path
from jaxllm.serving.elastic.tiny_lm import TinyLmBucket, TinyPlanner
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import TINY, tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import tiny_lm as random_tiny_lm

PROFILE = DeviceProfile(
    levels=(50, 100),
    tokens=(16, 64),
    chunk_tokens=(16, 64),
    ttft_ms=((1.0, 4.0), (2.0, 8.0)),
    tpot_ms=((0.5, 0.6), (1.0, 1.2)),
)


def test_times_between_lengths_are_those_of_whole_chunks(monkeypatch):
    assert PROFILE.ttft(100, 16) == PROFILE.ttft(100, 3) == 2.0
    # Seventeen tokens take two chunks of 16, each with a pass of 24: 80, between 40 and the 88 of one of 64.
    assert PROFILE.ttft(100, 17) == PROFILE.ttft(100, 32) == pytest.approx(2.0 + 6.0 * 40 / 48)
    assert PROFILE.ttft(50, 64) == 4.0
    assert PROFILE.tpot(100, 40) == pytest.approx(1.1)
    # Times at hand are those that are worked out.
    levels, lengths = (100, 50), [*range(70), 200]
    near = [(PROFILE.ttfts(levels, (each,)), PROFILE.tpots(levels, (each,))) for each in lengths]
    monkeypatch.setattr("jaxllm.serving.elastic.profile._LISTED_TOKENS", 0)
    far = dataclasses.replace(PROFILE)
    np.testing.assert_array_equal(np.hstack([each for each, _ in near]), far.ttfts(levels, lengths))
    np.testing.assert_array_equal(np.hstack([each for _, each in near]), far.tpots(levels, lengths))
    # Longer prompts than measured go straight on.
    assert PROFILE.ttft(50, 128) == pytest.approx(4.0 + 88 * 3.0 / 48)
    one = dataclasses.replace(PROFILE, tokens=(16,), ttft_ms=((1.0,), (2.0,)), tpot_ms=((1.0,), (1.0,)))
    assert one.ttft(50, 100) == 1.0
    with pytest.raises(ConfigError, match="level 70 was not profiled; there are 50, 100"):
        PROFILE.ttft(70, 16)
    with pytest.raises(ConfigError, match="has no energy"):
        PROFILE.joules(50, 10, 5)
    known = dataclasses.replace(PROFILE, energy=Energy(prefill_joules=(1.0, 2.0), decode_joules=(3.0, 5.0)))
    assert known.joules(100, 10, 5) == 45.0
    assert DeviceProfile.from_json(json.loads(json.dumps(known.to_json()))) == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"levels": (100, 50)}, "levels of a device profile must be ascending"),
        ({"tokens": ()}, "tokens of a device profile"),
        ({"chunk_tokens": (0, 16)}, "chunk_tokens of a device profile"),
        ({"chunk_tokens": (1, 1 << 19)}, "lie too far apart"),
        ({"tokens": (16, 10**400)}, "tokens of a device profile must be ascending, at most"),
        ({"tokens": tuple(range(1, 5000))}, "tokens of a device profile"),
        ({"ttft_ms": ((1.0, 2.0),)}, "ttft_ms of a device profile must be 2 x 2"),
        ({"tpot_ms": ((1.0, float("nan")), (1.0, 1.0))}, "numbers above 0"),
        ({"energy": Energy(prefill_joules=(1.0,), decode_joules=(1.0, 1.0))}, "prefill_joules"),
    ],
)
def test_impossible_profiles_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PROFILE, **change)


def test_profiles_are_kept_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "profiles" / "some.json"
    assert load_profile(path) is None
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    whole = path.read_bytes()
    other = whole.replace(b"0.5", b"0.6")
    assert other != whole
    for raw in (
        b"{", b"[]", b'{"levels": 3}', b" " * (1 << 21), other, json.dumps(PROFILE.to_json()).encode(),
    ):  # fmt: skip
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match=r"some\.json.*measure again"):
            load_profile(path)


def test_a_profile_that_others_could_have_written_is_not_used(tmp_path):
    path = tmp_path / "profiles" / "some.json"
    save_profile(PROFILE, path)
    assert (path.parent.stat().st_mode | path.stat().st_mode) & 0o077 == 0
    for place, mode in ((path, 0o602), (path.parent, 0o777)):
        before = place.stat().st_mode
        place.chmod(mode)
        with pytest.raises(ConfigError, match="others may write to it"):
            load_profile(path)
        place.chmod(before)
    assert load_profile(path) == PROFILE
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_profile(path)


def test_a_profile_keeps_what_an_earlier_one_knows_besides():
    energy = Energy(prefill_joules=(1.0, 2.0), decode_joules=(3.0, 5.0))
    known = dataclasses.replace(PROFILE, energy=energy)
    again = dataclasses.replace(PROFILE, ttft_ms=((1.5, 4.5), (2.5, 8.5)))
    assert again.completed_by(known) == dataclasses.replace(again, energy=energy)
    assert again.completed_by(None) == again
    other = dataclasses.replace(
        PROFILE, levels=(70, 100), ttft_ms=((1.6, 5.0), (2.2, 8.2)), tpot_ms=((0.8, 0.9), (1.1, 1.3))
    )
    merged = other.completed_by(known)
    assert (merged.levels, merged.energy) == ((50, 70, 100), None)
    assert merged.ttft_ms == ((1.0, 4.0), (1.6, 5.0), (2.2, 8.2))
    # Of other lengths nothing can be taken.
    assert other.completed_by(dataclasses.replace(PROFILE, tokens=(16, 32))) == other


# Profiles are measured.


OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), levels=(50, 75), buckets_bytes=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    parts = elastic_parts(Ladder(levels=(50, 75, 100)))
    path = write_tiny_bundle(tmp_path_factory.mktemp("profiled") / "tiny.jaxllm", cfg=TINY, parts=parts)
    return Engine.open(path, options=OPTIONS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = write_tiny_bundle(tmp_path_factory.mktemp("plain") / "plain.jaxllm", cfg=TINY)
    return Engine.open(path, options=dataclasses.replace(OPTIONS, levels=(), context_tokens=32))


def test_every_level_is_measured_and_a_profile_belongs_to_its_bundle(engine, plain, compiles):
    before = set(engine.runner.buckets.bucket_ms)
    seen = []
    with compiles() as count:
        profile = measure(engine, repeats=1, progress=lambda *step: seen.append(step))
    # What users ask for does not compile, so neither may what is timed for them.
    assert count() == 0
    assert (profile.levels, profile.tokens) == ((50, 75, 100), (16, 32, 47))
    assert seen[-1] == ("profile", 18, 18)
    assert min(min(row) for row in profile.ttft_ms) > 0
    assert set(engine.runner.buckets.bucket_ms) == before
    bundle, options = engine.model.bundle, engine.options
    places = {
        profile_path(bundle, options),
        profile_path(plain.model.bundle, options),
        profile_path(bundle, dataclasses.replace(options, cache_dtype="bfloat16")),
    }
    assert len(places) == 3
    # Which levels are served makes no other device.
    assert profile_path(bundle, dataclasses.replace(options, levels=())) in places


def test_times_are_made_monotonic():
    times = np.array([[1.0, 2.0, 4.0], [3.0, 2.5, 8.0], [2.0, 6.0, 7.0]])
    found = monotonic(times)
    assert (np.diff(found, axis=0) >= 0).all()
    assert (np.diff(found, axis=1) >= 0).all()
    # What is in order stays, and what is not stays in its neighbours' range.
    assert found[0].tolist() == [1.0, 2.0, 4.0]
    assert (found.min(), found.max() <= 8.0) == (1.0, True)
    np.testing.assert_array_equal(monotonic(found), found)


# Coarse profiles: levels between the measured ones lie on a line.


def test_levels_between_the_measured_ones_lie_on_a_line(engine, compiles, monkeypatch):
    monkeypatch.setattr(profiling, "COARSE_LENGTHS", (16, 32, 512))
    seen = []
    with compiles() as count:
        profile = measure_coarsely(engine, progress=lambda *step: seen.append(step))
    assert count() == 0
    assert (profile.levels, profile.tokens, profile.coarse) == ((50, 75, 100), (16, 32), True)
    for rows in (profile.ttft_ms, profile.tpot_ms):
        for small, middle, whole in zip(*rows, strict=True):
            assert 0 < small <= whole
            assert middle == pytest.approx((small + whole) / 2)
    assert seen == [("profile", 1, 2), ("profile", 2, 2)]
    # The planner asks for longer prompts, too.
    assert profile.ttft(75, 47) >= profile.ttft(75, 32)
    # A slow device is measured at two lengths.
    monkeypatch.setattr(profiling, "COARSE_LENGTHS", (16, 32, 40))
    times = iter(range(0, 1000, 20))
    assert measure_coarsely(engine, clock=lambda: next(times)).tokens == (16, 32)
    assert measure_coarsely(engine, clock=lambda: 0.0).tokens == (16, 32, 40)


def test_a_coarse_profile_is_measured_once_and_replaced_by_a_whole_one(engine, monkeypatch):
    counted = []

    def counting(measure):
        def measured(*arguments, **more):
            counted.append(measure.__name__)
            return measure(*arguments, **more)

        return measured

    monkeypatch.setattr(profiling, "measure", counting(measure))
    monkeypatch.setattr(profiling, "measure_coarsely", counting(measure_coarsely))
    first = known_profile(engine, coarse=True)
    assert known_profile(engine, coarse=True) == first
    assert load_profile(profile_path(engine.model.bundle, engine.options)) == first
    whole = known_profile(engine)
    assert (whole.coarse, whole.tokens) == (False, (16, 32, 47))
    assert known_profile(engine, coarse=True) == known_profile(engine) == whole
    assert counted == ["measure_coarsely", "measure"]


LEVELS, RATIOS = (40, 70, 100), (0.25, 0.5, 1.0)
TINY_LM = random_tiny_lm(LEVELS, RATIOS)
QUESTION = TaskExample(user="the quick brown fox jumps over the lazy dog", answer="", system="say it")
ALL = np.ones((3, 3), bool)


@pytest.fixture(scope="module", params=["floats", "8 bits"])
def planner(request):
    """One whose matrices are small, and one that takes them for large."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "8 bits":
            patch.setattr(tiny_lm, "_LARGE", 1)
        return TinyPlanner(TINY_LM, LEVELS)


@pytest.fixture(scope="module")
def prompt():
    return prompt_tokens(Tokenizer(tiny_tokenizer()), QUESTION)


def read_by_hand(prompt, slo, length=64):
    rows, mask = input_rows(prompt.ids, length)
    return forward_both(TINY_LM.params, marked(rows, slo, TINY_LM.mark_ids), mask, cfg=TINY_LM.cfg)


@pytest.mark.slow
@pytest.mark.parametrize(("slo", "row_tokens"), [(Slo(ttft=0.2, tpot=0.5), 64), (SLOS[4], 20)])
def test_the_likeliest_of_the_lightest_choices_is_proposed(prompt, slo, row_tokens):
    """A long prompt is read in rows as it was trained, and all of them decide."""
    assert len(prompt.ids) > 20
    _, heads = read_by_hand(prompt, slo, row_tokens)
    model, share = (np.asarray(each).mean(0) for each in heads)
    trained = random_tiny_lm(LEVELS, RATIOS, row_tokens=row_tokens) if row_tokens < 64 else TINY_LM
    found = TinyPlanner(trained, LEVELS, decision="lightest").propose(prompt, slo, ALL)
    assert found.level == LEVELS[int(np.argmax(model))]
    assert found.prompt_ratio == RATIOS[int(np.argmax(share))]


@pytest.mark.parametrize("slo", [Slo(ttft=0.2, tpot=0.5), Slo(ttft=0.9, tpot=0.9)])
@pytest.mark.parametrize("smallest", [True, False])
def test_the_choice_that_is_likeliest_right_is_proposed(planner, prompt, slo, smallest):
    # Either more of the model or more of the prompt.
    allowed = np.zeros((3, 3), bool)
    allowed[(0, 1, 2), (2, 1, 0)] = True
    if not smallest:
        allowed[0, 2] = False
    keep, heads = read_by_hand(prompt, slo)
    model, share = (np.exp(np.asarray(each, np.float64)[0]) for each in heads)
    right = np.cumsum(model)[:, None] * np.cumsum(share)
    level, ratio = np.unravel_index(np.argmax(np.where(allowed, right, 0)), right.shape)
    found = planner.propose(prompt, slo, allowed)
    assert (found.level, found.prompt_ratio) == (LEVELS[level], RATIOS[ratio])
    # Scores are the probabilities of the tokens; large weights are at 8 bits with native kernels.
    expected = 1 / (1 + np.exp(-np.asarray(keep)[0, 2 : 2 + len(prompt.ids)]))
    np.testing.assert_allclose(found.scores, expected, atol=0.06)
    # With time for everything everything is taken.
    found = planner.propose(prompt, slo, ALL)
    assert (found.level, found.prompt_ratio) == (LEVELS[-1], RATIOS[-1])


def test_only_what_is_allowed_is_proposed(planner, prompt):
    for level, ratio in itertools.product(range(3), repeat=2):
        allowed = np.zeros((3, 3), bool)
        allowed[level, ratio] = True
        found = planner.propose(prompt, SLOS[0], allowed)
        assert (found.level, found.prompt_ratio) == (LEVELS[level], RATIOS[ratio])
    # Levels that it does not know are never proposed.
    other = TinyPlanner(TINY_LM, (20, 40, 100))
    assert {other.propose(prompt, slo, ALL).level for slo in SLOS} <= {40, 100}
    with pytest.raises(ConfigError, match="of which none is served"):
        TinyPlanner(TINY_LM, (20, 50))


def test_long_prompts_take_several_passes(planner, prompt):
    more = dataclasses.replace(QUESTION, user=QUESTION.user + " and so on" * 12)
    long = prompt_tokens(Tokenizer(tiny_tokenizer()), more)
    passes = -(-len(long.ids) // 62)
    assert passes > 2
    assert planner.propose(long, SLOS[0], ALL).scores.shape == long.ids.shape
    assert planner.planning_ms(len(long.ids)) == pytest.approx(passes * planner.planning_ms(62))
    assert planner.planning_ms(10) > 0
    # A tokenizer of its own scores the same words.
    own = TinyPlanner(random_tiny_lm(LEVELS, RATIOS, tokenizer=tiny_tokenizer(chat=False)), LEVELS)
    found = own.propose(prompt, SLOS[1], ALL)
    assert found.scores.shape == prompt.ids.shape
    for word in set(prompt.words.tolist()):
        assert len(set(found.scores[prompt.words == word].tolist())) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("own_compilations")
def test_a_service_plans_with_the_bundles_tiny_lm(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    parts = {**elastic_parts(Ladder(levels=LEVELS)), **tiny_lm_parts(TINY_LM)}
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", parts=parts)
    options = EngineOptions(context_tokens=64, chunk_tokens=(16, 64), buckets_bytes=1 << 28)
    service = LLMService.open(path, options=options)
    answer = service.call(QUESTION.user, slo=Slo(ttft=0.99, tpot=0.99), max_tokens=4).result()
    assert answer.plan.source in ("proposed", "fallback", "nearest")
    # A second process reads its buckets.
    compiled = []
    monkeypatch.setattr(TinyLmBucket, "lower", lambda *args: compiled.append(args))
    LLMService.open(path, options=options)
    assert compiled == []
