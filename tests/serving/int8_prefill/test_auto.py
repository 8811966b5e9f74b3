"""Prompts that are read in integers where the device's profile says that it is faster, else in floats."""

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm import Engine
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.serving.buckets.model import PrefillBucket
from jaxllm.serving.elastic import profiling
from jaxllm.serving.elastic.profile import DeviceProfile, load_profile
from jaxllm.serving.elastic.profiling import choose_prefill
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.int8_prefill.buckets import IntegerChunkBucket
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.server.service import LLMService
from tests.tiny import TINY, WINDOW_TOKENS

OPTIONS = EngineOptions(
    chunk_tokens=(16,),
    cache_tokens=(WINDOW_TOKENS,),
    cache_dtype="float32",
    buckets_bytes=0,
    prefill=PrefillOptions(mode="auto"),
)
PROMPT = np.random.default_rng(0).integers(0, TINY.vocab_size, 60).tolist()


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
        chunks = runner.chunks_in(mode, len(PROMPT))
        return np.asarray(prefill_prompt(runner, runner.start(60), PROMPT, 0, chunks)[0])

    modes = {mode: logits_in(mode) for mode in ("int8", "float")}
    assert not np.array_equal(modes["int8"], modes["float"])
    for integers, floats, chosen in ((1.0, 9.0, "int8"), (9.0, 1.0, "float")):
        choose_prefill(engine, with_times(service.profile, integers, floats))
        before = runner.int8.shared.outliers.products
        logits, _ = prefill_prompt(runner, runner.start(60), PROMPT, 0)
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


def test_commands(calibrated_bundle, tmp_path, monkeypatch, caplog):
    """Measured by one, used by the other; and what is missing is said."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    ask = ["generate", "-m", str(calibrated_bundle), "--prefill", "auto", "-p", "ab", "-n", "1", "--json"]
    run = CliRunner().invoke(cli, ask)
    assert run.exit_code == 0, run.output
    assert '"prefill": "float"' in run.stdout
    assert "jaxllm profile" in caplog.text
