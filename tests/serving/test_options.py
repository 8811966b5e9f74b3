import itertools

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.ground.options import EngineOptions
from tests.tiny import TINY

CFG = TINY


def test_resolve_chooses_for_the_model_and_device():
    options = EngineOptions().resolve(CFG, backend="cpu")
    assert options.context_tokens == CFG.window_tokens
    assert options.cache_tokens[-1] == CFG.window_tokens
    assert options.activation_dtype == "float32"
    assert EngineOptions().resolve(CFG, backend="gpu").activation_dtype == "bfloat16"


def test_cache_lengths_grow_by_four_up_to_the_context():
    options = EngineOptions(context_tokens=CFG.window_tokens, cache_tokens=())
    lengths = options.resolve(CFG).cache_tokens
    assert list(lengths) == sorted(lengths)
    assert all(b <= 4 * a for a, b in itertools.pairwise(lengths))


def test_resolve_is_idempotent():
    once = EngineOptions(context_tokens=32).resolve(CFG)
    assert once.resolve(CFG) == once


def test_no_chunk_is_useless():
    options = EngineOptions(context_tokens=20).resolve(CFG, backend="cpu")
    assert options.chunk_tokens == (16,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(context_tokens=-1), "context_tokens"),
        (dict(chunk_tokens=(17,)), "among"),
        (dict(chunk_tokens=(64, 16)), "ascending"),
        (dict(cache_tokens=(64, 32)), "ascending"),
        (dict(cache_tokens=(0, 32)), "each of cache_tokens must be a whole number of at least 1"),
        (dict(decode_block=0), "decode_block"),
        (dict(decode_block=100000), "decode_block"),
        (dict(activation_dtype="float64"), "activation_dtype"),
        (dict(buckets_bytes=-1), "buckets_bytes"),
    ],
)
def test_bad_options_say_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


def test_a_context_beyond_the_window_is_refused():
    with pytest.raises(ConfigError, match="window"):
        EngineOptions(context_tokens=CFG.window_tokens + 1).resolve(CFG)


def test_how_much_is_kept_is_an_option_before_it_is_an_environment_variable(monkeypatch):
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES", raising=False)
    assert EngineOptions().resolve(CFG).buckets_bytes == 1 << 30
    monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "123")
    assert EngineOptions().resolve(CFG).buckets_bytes == 123
    assert EngineOptions(buckets_bytes=0).resolve(CFG).buckets_bytes == 0
    monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "1 GiB")
    with pytest.raises(ConfigError, match="JAXLLM_BUCKETS_BYTES must be a number of bytes"):
        EngineOptions().resolve(CFG)


def test_caches_must_hold_the_context():
    with pytest.raises(ConfigError, match="must equal context_tokens"):
        EngineOptions(context_tokens=64, cache_tokens=(16, 32)).resolve(CFG)
