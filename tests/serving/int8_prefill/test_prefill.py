"""Tests which prompts are prefilled in integers, by options, bundles, levels and times, and by which
products."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import prefill_parts
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.cli.main import cli
from jaxllm.elastic.ladder import Ladder, sub_config, sub_model
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.reference import forward_by_rule, integer_rule
from jaxllm.models.decoder import logits
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.buckets.model import PrefillBucket
from jaxllm.serving.elastic import profiling
from jaxllm.serving.elastic.profile import DeviceProfile, load_profile
from jaxllm.serving.elastic.profiling import choose_prefill
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.buckets import IntegerChunkBucket, IntegerStageBucket
from jaxllm.serving.int8_prefill.modes import chosen_prefill
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.server.service import LLMService
from tests.int8_prefill.calibrated import calibrated, outlying, stored
from tests.models.test_lora import random_adapter
from tests.tiny import TINY, WINDOW_TOKENS, write_tiny_bundle


def chosen(path, *, levels=(100,), streamed=False, **how):
    options = EngineOptions(prefill=PrefillOptions(**how))
    with Bundle.open(path) as bundle:
        return chosen_prefill(bundle, options, levels, streamed=streamed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("plain") / "plain.jaxllm", "int8")


def test_what_is_asked_for(calibrated_bundle, plain, caplog):
    for how in ({"mode": "int8"}, {"mode": "auto"}, {"processors": 2}):
        assert chosen(calibrated_bundle, **how).integer_levels == {100}
    with pytest.raises(ConfigError, match="two processors prefill in integers"):
        PrefillOptions(mode="float", processors=2)
    # What was left to the bundle is said.
    assert chosen(plain, mode="auto") is None
    assert "prefilled in floats: " in caplog.text
    assert "was not calibrated" in caplog.text
    caplog.clear()
    assert chosen(calibrated_bundle, mode="auto", most_loss=0.001) is None
    assert "more than 0.10%" in caplog.text


@pytest.mark.parametrize("how", [{"mode": "int8"}, {"processors": 2}, {"mode": "auto", "processors": 2}])
def test_what_cannot_be_is_refused_by_name(calibrated_bundle, plain, tmp_path, how):
    """Two processors take integers, too: floats without a word would leave one of them out."""
    with pytest.raises(ConfigError, match=r"was not calibrated.*`jaxllm calibrate prefill .*plain.jaxllm "):
        chosen(plain, **how)
    with pytest.raises(ConfigError, match="more --memory"):
        chosen(calibrated_bundle, streamed=True, **how)
    with pytest.raises(ConfigError, match=r"lose 0\.20% of level 100's perplexity, more than 0\.10%"):
        chosen(calibrated_bundle, most_loss=0.001, **how)
    floats = write_tiny_bundle(tmp_path / "f32.jaxllm", params=outlying(), parts=prefill_parts(calibrated()))
    with pytest.raises(ConfigError, match="has f32"):
        chosen(floats, **how)
    cfg = dataclasses.replace(TINY, experts=2, experts_per_token=1)
    mixture = write_tiny_bundle(tmp_path / "moe.jaxllm", "int8", cfg=cfg)
    with pytest.raises(ConfigError, match="mixture of experts has no integer prefill"):
        chosen(mixture, **how)


def test_a_level_that_was_never_measured_is_refused_by_itself(calibrated_bundle, caplog):
    # Any loss may be allowed, but there are no activation scales.
    for how in ({}, {"most_loss": float("inf")}):
        assert chosen(calibrated_bundle, mode="int8", levels=(50, 100), **how).integer_levels == {100}
    assert "prompts of level 50 (inf%) are prefilled in floats" in caplog.text
    with pytest.raises(ConfigError, match="of level 50's perplexity"):
        chosen(calibrated_bundle, mode="int8", levels=(50,))


# Levels of an elastic bundle: with activation scales of their own, in shared buckets.

LADDER = Ladder(levels=(50, 100), anchors=())
PROMPT = np.random.default_rng(3).integers(0, TINY.vocab_size, 32).tolist()


@pytest.fixture(scope="module")
def known():
    """A calibration with other steps at each level."""
    whole = calibrated()
    steps = np.stack([1.25 * whole.steps[0], whole.steps[0]]).astype(np.float32)
    return dataclasses.replace(whole, levels=(50, 100), steps=steps, losses={50: (0, 0), 100: (0, 0)})


@pytest.fixture(scope="module")
def engine(known, tmp_path_factory):
    return opened(tmp_path_factory.mktemp("levels") / "e.jaxllm", known)


def opened(path, calibration, **more):
    parts = elastic_parts(LADDER) | prefill_parts(calibration)
    write_tiny_bundle(path, "int8", params=outlying(), parts=parts)
    options = EngineOptions(
        chunk_tokens=(32,), cache_dtype="float32", levels=(50,), buckets_bytes=0,
        prefill=PrefillOptions(mode="int8"),
    )  # fmt: skip
    return Engine.open(path, options=options, warm_up=False, **more)


@pytest.mark.slow
@pytest.mark.parametrize("level", [50, 100])
def test_each_level_is_read_as_calibrated(engine, known, level):
    runner = engine.runner_at(level)
    runner.fill(runner.buckets_for(32, 1))
    found, _ = prefill_prompt(runner, runner.start(32), PROMPT, 0)
    cfg = sub_config(TINY, LADDER, level)
    layers, params = known.layers(level, cfg), sub_model(stored(), cfg)

    @jax.jit
    def reference(params, layers, tokens):
        hidden = forward_by_rule(params, tokens, integer_rule(params, layers, cfg), cfg=cfg)
        return logits(params, hidden[-1], cfg=cfg)

    wanted = np.asarray(reference(params, layers, np.array(PROMPT, np.int32)))
    np.testing.assert_allclose(np.asarray(found)[0], wanted, atol=2e-2 * np.abs(wanted).max())
    assert engine.runner_at(50).int8.shared is engine.runner.int8.shared


def test_a_lossy_level_is_read_in_floats_beside_the_others(known, tmp_path, caplog):
    """Its buckets are there, too; and who asks for that level and integers by name is refused."""
    lossy = dataclasses.replace(known, losses={50: (0.001, 0.02), 100: (0.001, 0.001)})
    engine = opened(tmp_path / "e.jaxllm", lossy)
    assert (engine.prefill_mode(32, 50), engine.prefill_mode(32, 100)) == ("float", "int8")
    assert "prompts of level 50 (2.00%) are prefilled in floats" in caplog.text
    integers, floats = IntegerChunkBucket, PrefillBucket
    for level, own, other in ((50, floats, integers), (100, integers, floats)):
        families = {type(each) for each in engine.runner_at(level).buckets_for()}
        assert own in families
        assert other not in families
    with pytest.raises(ConfigError, match=r"lose 2\.00% of level 50's perplexity"):
        opened(tmp_path / "other.jaxllm", lossy, level=50)


# An adapter is not what a bundle's loss was measured with: it is refused, or prompts are read in floats.

LORA = LoraConfig(rank=2, targets=("attn.q",))
ADAPTABLE = EngineOptions(
    chunk_tokens=(16,), cache_tokens=(64,), context_tokens=64, buckets_bytes=0, adapter_rank=2,
    adapter_targets=LORA.targets,
)  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(folder, TINY, LORA, random_adapter(TINY, LORA))
    return folder


def adaptable(bundle, adapter=None, **how) -> Engine:
    options = dataclasses.replace(ADAPTABLE, prefill=PrefillOptions(**how))
    return Engine.open(bundle, options=options, adapter=adapter, warm_up=False)


def test_it_is_refused_where_integers_were_asked_for(calibrated_bundle, adapter):
    engine = adaptable(calibrated_bundle, mode="int8")
    with pytest.raises(ConfigError, match=r"measured without an adapter.*--prefill float"):
        engine.set_adapter(adapter)
    assert not engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"
    with pytest.raises(ConfigError, match="measured without an adapter"):
        adaptable(calibrated_bundle, adapter, mode="int8")
    # Any loss may be allowed.
    engine = adaptable(calibrated_bundle, adapter, mode="int8", most_loss=float("inf"))
    assert engine.model.adapter_digest
    assert engine.prefill_mode(20) == "int8"


def test_prompts_are_read_in_floats_while_there_is_one(calibrated_bundle, adapter, caplog):
    """As long as it is on the model, whatever the profile says; the buckets for it are there."""
    engine = adaptable(calibrated_bundle, mode="auto")
    engine.model.runners.modes.choose_by(lambda level, tokens: True)
    assert engine.prefill_mode(20) == "int8"
    engine.set_adapter(adapter)
    assert engine.prefill_mode(20) == "float"
    assert caplog.text.count("while the model has an adapter") == 1
    assert {PrefillBucket, IntegerChunkBucket} <= {type(each) for each in engine.runner.buckets_for()}
    engine.set_adapter(None)
    assert engine.prefill_mode(20) == "int8"


# With "auto" integers where the device's profile says that they are faster, else floats.

OPTIONS = EngineOptions(
    chunk_tokens=(16,),
    cache_tokens=(WINDOW_TOKENS,),
    cache_dtype="float32",
    buckets_bytes=0,
    prefill=PrefillOptions(mode="auto"),
)
LONG = np.random.default_rng(0).integers(0, TINY.vocab_size, 60).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def service(calibrated_bundle, folder) -> LLMService:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE", str(folder))
        patch.setattr(profiling, "LENGTHS", (16, 64))
        return LLMService.open(calibrated_bundle, options=OPTIONS)


def with_times(profile: DeviceProfile, integers: float, floats: float) -> DeviceProfile:
    """As if floats were ahead for the shortest prompt alone, or by these factors."""
    assert profile.prefill is not None
    ones = np.ones_like(profile.ttft_ms)
    ones[:, 0] /= 10
    known = dataclasses.replace(
        profile.prefill,
        integer_ms=tuple(map(tuple, (integers * np.maximum(ones, 0.2)).tolist())),
        float_ms=tuple(map(tuple, (floats * ones).tolist())),
    )
    return dataclasses.replace(profile, prefill=known)


def test_the_faster_one_is_taken(service):
    engine, runner = service.engine, service.engine.runner

    def logits_in(mode):
        chunks = runner.chunks_in(mode, len(LONG))
        return np.asarray(prefill_prompt(runner, runner.start(60), LONG, 0, chunks)[0])

    modes = {mode: logits_in(mode) for mode in ("int8", "float")}
    assert not np.array_equal(modes["int8"], modes["float"])
    for integers, floats, chosen in ((1.0, 9.0, "int8"), (9.0, 1.0, "float")):
        choose_prefill(engine, with_times(service.profile, integers, floats))
        before = runner.int8.shared.outliers.products
        logits, _ = prefill_prompt(runner, runner.start(60), LONG, 0)
        np.testing.assert_array_equal(np.asarray(logits), modes[chosen])
        assert (runner.int8.shared.outliers.products > before) == (chosen == "int8")
        assert engine.prefill_mode(60) == chosen
        # The answer says which.
        answer = service.call("a few words, and some more of them to read", max_tokens=2).result()
        assert answer.prefill_mode == chosen
        assert answer.tokens
    # It depends on the prompt.
    choose_prefill(engine, with_times(service.profile, 1.0, 1.5))
    assert [engine.prefill_mode(tokens) for tokens in (5, 60)] == ["float", "int8"]


def test_what_is_not_measured_or_loses_too_much_is_read_in_floats(calibrated_bundle):
    engine = Engine.open(calibrated_bundle, options=OPTIONS, warm_up=False)
    assert engine.runner.int8 is not None
    families = {type(bucket) for bucket in engine.runner.buckets_for(60, 2)}
    assert PrefillBucket in families
    assert IntegerChunkBucket not in families
    how = PrefillOptions(mode="auto", most_loss=0.0001)
    strict = Engine.open(calibrated_bundle, options=dataclasses.replace(OPTIONS, prefill=how), warm_up=False)
    assert strict.runner.int8 is None
    assert engine.prefill_mode(60) == strict.prefill_mode(60) == "float"


def test_profiles_of_both_modes(service, folder):
    """They are measured and kept."""
    known = service.profile.prefill
    assert known is not None
    assert len(known.integer_ms) == len(known.float_ms) == 1
    assert len(known.integer_ms[0]) == len(service.profile.tokens)
    (kept,) = (folder / "profiles").iterdir()
    assert load_profile(kept) == service.profile
    known = with_times(service.profile, 1.0, 2.0)
    bare = dataclasses.replace(known, prefill=None)
    assert bare.completed_by(known) == known
    assert not bare.integers_are_faster(100, 60)
    assert not known.integers_are_faster(50, 60)
    with pytest.raises(ConfigError, match="integer_ms"):
        with_times(service.profile, -1.0, 2.0)


def test_a_command_without_a_profile_says_what_is_missing(calibrated_bundle, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    ask = ["generate", "-m", str(calibrated_bundle), "--prefill", "auto", "-p", "ab", "-n", "1", "--json"]
    run = CliRunner().invoke(cli, ask)
    assert run.exit_code == 0, run.output
    assert '"prefill": "float"' in run.stdout
    assert "jaxllm profile" in caplog.text


INTEGERS = EngineOptions(
    chunk_tokens=(16, 32),
    cache_tokens=(64, WINDOW_TOKENS),
    cache_dtype="float32",
    buckets_bytes=0,
    prefill=PrefillOptions(mode="int8"),
)
# One token, a chunk's end and beyond, several chunks, padding in the last, the whole window.
LENGTHS = (1, 15, 16, 17, 32, 33, 64, 96, 101, WINDOW_TOKENS)


@pytest.fixture(scope="module")
def integers(calibrated_bundle) -> Engine:
    return Engine.open(calibrated_bundle, options=INTEGERS)


@functools.cache
def reference():
    def run(params, layers, tokens):
        hidden = forward_by_rule(params, tokens, integer_rule(params, layers, TINY), cfg=TINY)
        return logits(params, hidden, cfg=TINY)

    return jax.jit(run)


def expected(tokens: list[int], calibration=None) -> np.ndarray:
    """Logits `[T, V]` of a prompt read by the calibrated products."""
    layers = (calibration or calibrated()).layers(100, TINY)
    # Of one length, so that it is compiled once; what comes behind a token does not matter to it.
    row = np.zeros(WINDOW_TOKENS, np.int32)
    row[: len(tokens)] = tokens
    return np.asarray(reference()(stored(), layers, row))[: len(tokens)]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, TINY.vocab_size, length).tolist()


def read(engine: Engine, tokens: list[int]):
    found, cache = prefill_prompt(engine.runner, engine.runner.start(len(tokens)), tokens, 0)
    return np.asarray(found), cache


def test_every_length_is_read_as_calibrated(integers, compiles):
    """Chunked = whole, for any length; and nothing is compiled for any of them."""
    tokens = prompt(WINDOW_TOKENS)
    known = expected(tokens)
    built = dict(integers.runner.buckets.bucket_ms)
    with compiles() as count:
        for length in LENGTHS:
            found, cache = read(integers, tokens[:length])
            np.testing.assert_allclose(found[0], known[length - 1], atol=2e-2 * np.abs(known).max())
            assert int(cache.length) == length
        # A prompt that goes on behind what the cache holds.
        _, cache = prefill_prompt(integers.runner, integers.runner.start(96), tokens[:40], 0)
        found, cache = prefill_prompt(integers.runner, cache, tokens[40:96], 40)
    whole, _ = read(integers, tokens[:96])
    np.testing.assert_allclose(found, whole, atol=1e-2 * np.abs(whole).max())
    assert int(cache.length) == 96
    assert count() == 0
    assert integers.runner.buckets.bucket_ms == built
    # A chunk is one bucket: of all layers, for all chunks of its length, one for each length of the cache.
    buckets = integers.runner.buckets_for()
    chunks = [each for each in buckets if isinstance(each, IntegerChunkBucket)]
    lengths = [(each.tokens, each.cache_tokens) for each in chunks]
    assert sorted(lengths) == [(16, 64), (16, WINDOW_TOKENS), (32, 64), (32, WINDOW_TOKENS)]
    assert {sum(each.shadowed) for each in chunks} == {sum(integers.runner.int8.calibration.shadowed)}
    assert not any(isinstance(each, PrefillBucket | IntegerStageBucket) for each in buckets)


def test_it_answers(integers):
    """Sampling, decoding and sessions go on from its cache; what it did is counted."""
    before = dataclasses.replace(integers.runner.int8.shared.outliers)
    answer = integers.generate(prompt(40), GenerationConfig(max_tokens=20, ignore_eos=True))
    assert len(answer.tokens) == 20
    counts = integers.runner.int8.shared.outliers
    # Two chunks of 40 tokens, one layer with a shadow at four products.
    assert counts.products == before.products + 8
    assert counts.channels > before.channels
    assert counts.enlarged == before.enlarged


def test_more_outliers_than_expected_are_not_dropped(calibrated_bundle):
    """With steps that are far too small nearly all is shadow: the product stays what it is, and it is
    said."""
    options = dataclasses.replace(INTEGERS, chunk_tokens=(32,))
    engine = Engine.open(calibrated_bundle, options=options, warm_up=False)
    runner, known = engine.runner, calibrated()
    narrow = known.steps.copy()
    narrow[:, known.shadowed.index(True)] /= 50
    runner.int8.calibration = dataclasses.replace(known, steps=narrow)
    engine.warm_up(prompt_tokens=32, max_tokens=1)
    tokens = prompt(32)
    found, _ = read(engine, tokens)
    wanted = expected(tokens, runner.int8.calibration)[-1]
    np.testing.assert_allclose(found[0], wanted, atol=2e-2 * np.abs(wanted).max())
    assert runner.int8.shared.outliers.enlarged > 0
    # Broken weights are not hidden.
    params = dict(runner.model.weights)
    params["layers.0.attn_norm.scale"] = params["layers.0.attn_norm.scale"].at[3].set(np.nan)
    runner.model.put(runner.model.prepared(params))
    assert np.isnan(read(engine, tokens)[0]).all()
