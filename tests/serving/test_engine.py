"""The engine against the plainest possible loop, and what a request may and may not do."""

import dataclasses
import itertools
import threading
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine, GenerationConfig, Sampling
from jaxllm.errors import BucketMissing, ConfigError, ContextOverflow
from jaxllm.kernels.native import Kernels
from jaxllm.models.decoder import forward, logits
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.model import DecodeBucket, PrefillBucket, SampleBucket, StartBucket
from jaxllm.serving.engine.request import Session
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.runners.runner import _PASS_TOKENS, plan_chunks, prefill_prompt
from jaxllm.serving.weights.model_level import ModelLevel
from tests.tiny import TINY, write_tiny_bundle

PROMPT = [5, 9, 2, 44, 17, 3, 3, 8]


@pytest.fixture(scope="module")
def greedy(engine):
    """Greedy ids after a prompt by feeding the whole sequence anew for each token."""
    params = engine.model.bundle.load()
    length = engine.options.context_tokens

    @jax.jit
    def next_token(tokens, count):
        hidden, _ = forward(params, tokens, cfg=engine.cfg)
        return jnp.argmax(logits(params, hidden[0, count - 1], cfg=engine.cfg))

    def run(prompt, count):
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + count):
            tokens[0, at] = next_token(tokens, np.int32(at))
        return tokens[0, len(prompt) : len(prompt) + count].tolist()

    return run


def config(max_tokens=20, **options):
    return GenerationConfig(max_tokens=max_tokens, ignore_eos=True, **options)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33, 50])
def test_greedy_equals_the_plain_loop_for_prompts_around_chunk_and_cache_lengths(engine, greedy, count):
    prompt = np.random.default_rng(count).integers(0, engine.cfg.vocab_size, count).tolist()
    assert engine.generate(prompt, config()).tokens == greedy(prompt, 20)


def test_answers_as_long_as_the_window(engine, greedy):
    """A sequence that outgrows its cache goes on unharmed, until the window ends it."""
    room = engine.options.context_tokens - len(PROMPT) + 1
    answer = engine.generate(PROMPT, config(max_tokens=10_000))
    assert (len(answer.tokens), answer.finish_reason) == (room, "length")
    assert answer.tokens[:-1] == greedy(PROMPT, room - 1)
    assert len(engine.generate([7] * engine.options.context_tokens, config()).tokens) == 1


@pytest.mark.parametrize("block", [1, 3])
def test_block_size_changes_no_token(tiny_bundle, engine, block):
    options = dataclasses.replace(engine.options, decode_block=block)
    other = Engine.open(tiny_bundle, options=options, warm_up=False)
    other.warm_up(prompt_tokens=len(PROMPT), max_tokens=30)
    sampled = config(max_tokens=30, sampling=Sampling(temperature=1.5, top_k=50, seed=11))
    assert other.generate(PROMPT, sampled).tokens == engine.generate(PROMPT, sampled).tokens


def test_how_answers_end(engine):
    messages = [{"role": "user", "content": "hello"}]
    ids = engine.tokenizer.encode_chat(messages)
    assert engine.chat(messages, config()).result().tokens == engine.generate(ids, config()).tokens
    whole = engine.stream(PROMPT, config(max_tokens=40))
    assert "".join(whole) == whole.text == engine.tokenizer.decode(whole.tokens)
    # A stop string is never shown, and nothing behind it stays in the session.
    session, stop = Session(), whole.text[9:12]
    stopped = engine.stream(PROMPT, config(max_tokens=40, stop=(stop,)), session=session)
    assert "".join(stopped) == stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", stop)
    assert session.tokens == (PROMPT + stopped.tokens)[: len(session.tokens)]
    assert len(session.tokens) >= len(PROMPT) + len(stopped.tokens) - 1
    # A stop token is no text.
    token = whole.tokens[12]
    end = whole.tokens.index(token)
    stopped = engine.generate(PROMPT, config(max_tokens=40, stop_token_ids=(token,)))
    assert (stopped.tokens, stopped.finish_reason) == (whole.tokens[: end + 1], "stop")
    assert stopped.text == engine.tokenizer.decode(whole.tokens[:end])
    # Nor is the end token, unless it is ignored.
    eos = engine.tokenizer.eos_ids[0]
    always_eos = Sampling(logit_bias=((eos, 1e6),))
    stopped = engine.generate(PROMPT, GenerationConfig(max_tokens=5, sampling=always_eos))
    assert (stopped.tokens, stopped.finish_reason, stopped.text) == ([eos], "stop", "")
    ignored = engine.generate(PROMPT, config(max_tokens=5, sampling=always_eos))
    assert (ignored.tokens, ignored.finish_reason) == ([eos] * 5, "length")
    never_eos = config(max_tokens=9, sampling=Sampling(logit_bias=((eos, -np.inf),)))
    others = engine.generate(PROMPT, never_eos).tokens
    for least in (1, 4, 9):
        late = GenerationConfig(max_tokens=9, min_tokens=least, sampling=always_eos)
        assert engine.generate(PROMPT, late).tokens == [*others[:least], eos][:9]
    with pytest.raises(ConfigError, match="min_tokens must be at most max_tokens"):
        GenerationConfig(max_tokens=2, min_tokens=3)


def test_same_seed_same_answer_and_the_seed_is_told(engine):
    sampled = config(max_tokens=30, sampling=Sampling(temperature=2.0))
    first = engine.generate(PROMPT, sampled)
    again = config(max_tokens=30, sampling=Sampling(temperature=2.0, seed=first.seed))
    assert engine.generate(PROMPT, again).tokens == first.tokens
    other = config(max_tokens=30, sampling=Sampling(temperature=2.0, seed=first.seed ^ 1))
    assert engine.generate(PROMPT, other).tokens != first.tokens


def test_a_session_feeds_only_what_is_new_and_answers_the_same(engine):
    session = Session()

    def turn(tokens):
        again = engine.stream(tokens, config(max_tokens=10), session=session).result()
        assert again.tokens == engine.generate(tokens, config(max_tokens=10)).tokens
        return again

    first = turn(PROMPT)
    # All but the answer's last token, which was never fed, and the new turn.
    second = turn([*PROMPT, *first.tokens, 21, 22, 23])
    assert second.reused_tokens == len(PROMPT) + len(first.tokens) - 1
    # Of an edited history the rest is forgotten.
    assert turn([*PROMPT[:4], 60, 61, 62]).reused_tokens == 4
    # An answer that is closed early leaves a usable session.
    closed = engine.stream(PROMPT, config(max_tokens=60), session=session)
    next(closed)
    closed.close()
    assert closed.finish_reason is None
    assert turn([*PROMPT, *closed.tokens, 30]).reused_tokens >= len(PROMPT)


def test_a_failed_dispatch_empties_the_session(engine, monkeypatch):
    session = Session()
    engine.stream(PROMPT, config(max_tokens=4), session=session).result()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", Mock(side_effect=RuntimeError("device lost")))
        with pytest.raises(RuntimeError, match="device lost"):
            engine.stream(PROMPT, config(), session=session).result()
    # The cache was given away: nothing may claim to be in it.
    assert (session.tokens, session.cache) == ([], None)
    answer = engine.stream(PROMPT, config(max_tokens=4), session=session).result()
    assert answer.tokens == engine.generate(PROMPT, config(max_tokens=4)).tokens


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, ConfigError, "empty"),
        ([1] * 129, {}, ContextOverflow, "129 tokens"),
        ([-1], {}, ConfigError, "vocabulary"),
        ([10**6], {}, ConfigError, "vocabulary"),
        (PROMPT, {"stop_token_ids": tuple(range(17))}, ConfigError, "stop tokens"),
        (PROMPT, {"stop_token_ids": (1 << 40,)}, ConfigError, "stop_token_ids"),
        (PROMPT, {"max_tokens": 0}, ConfigError, "max_tokens"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(engine, prompt, options, error, message):
    with pytest.raises(error, match=message):
        engine.stream(prompt, config(**options))


def test_a_missing_bucket_raises_instead_of_compiling(engine):
    model = ModelLevel(engine.cfg, engine.model.bundle.load(), engine.options)
    empty = ResidentRunner(model, BucketTable(model.shapes))
    with pytest.raises(ContextOverflow, match="do not fit"):
        empty.start(10)
    some = engine.runner.start(10)
    with pytest.raises(BucketMissing, match="PrefillBucket"):
        prefill_prompt(empty, some, PROMPT, 0)


def test_the_buckets_of_a_request_are_among_those_of_any(engine):
    runner = engine.runner
    every = set(runner.buckets_for())
    for prompt, answer in itertools.product((1, 16, 33, 128), (0, 1, 40)):
        needed = runner.buckets_for(prompt, answer)
        assert set(needed) <= every
        # The first token needs all but the bucket of further ones, in the same cache.
        (cache,) = {each.cache_tokens for each in needed if isinstance(each, StartBucket)}
        first = runner.buckets_for(prompt, 1, caches=[cache])
        assert {type(each) for each in set(needed) - set(first)} == ({DecodeBucket} if answer != 1 else set())
    trees = set(runner.buckets_for(8, 8, trees=[4])) - set(runner.buckets_for(8, 8))
    assert [(each.tokens, each.cache_tokens) for each in trees] == [(4, 32)]


def test_nothing_compiles_after_warm_up(engine, compiles):
    rng = np.random.default_rng(0)
    session = Session()
    with compiles() as count:
        for _ in range(40):
            length = int(rng.integers(1, engine.options.context_tokens))
            prompt = rng.integers(0, engine.cfg.vocab_size, length).tolist()
            sampling = Sampling(temperature=float(rng.integers(2)), top_p=0.9, top_k=5)
            request = config(max_tokens=int(rng.integers(1, 40)), sampling=sampling)
            engine.stream(prompt, request, session=session).result()
            if rng.integers(2):
                session = Session()
        assert count() == 0
        # The counter counts.
        jax.jit(lambda x: x * 3 + 1).lower(np.float32(1)).compile()
    assert count() == 1


def test_one_request_compiles_only_what_it_needs(tiny_bundle, engine, monkeypatch):
    other = Engine.open(tiny_bundle, options=engine.options, warm_up=False)
    # One token needs no bucket for others.
    other.warm_up(prompt_tokens=len(PROMPT), max_tokens=1)
    assert other.generate(PROMPT, config(1)).tokens == engine.generate(PROMPT, config(1)).tokens
    needed = {PrefillBucket(tokens=16, cache_tokens=32), SampleBucket(), StartBucket(cache_tokens=32)}
    buckets = other.runner.buckets
    assert set(buckets.bucket_ms) == needed
    other.warm_up(prompt_tokens=len(PROMPT), max_tokens=20)
    assert other.generate(PROMPT, config()).tokens == engine.generate(PROMPT, config()).tokens
    assert set(buckets.bucket_ms) == {*needed, DecodeBucket(block_tokens=8, cache_tokens=32)}
    # A rehearsal runs every bucket, and leaves no trace.
    ran = []

    def spied(family, compiled):
        def run(*args):
            ran.append(family)
            return compiled(*args)

        return run

    with monkeypatch.context() as patch:
        for bucket, compiled in list(buckets._compiled.items()):
            patch.setitem(buckets._compiled, bucket, spied(type(bucket), compiled))
        other.runner.rehearse()
    assert set(ran) == {StartBucket, PrefillBucket, SampleBucket, DecodeBucket}
    assert other.generate(PROMPT, config()).tokens == engine.generate(PROMPT, config()).tokens


def test_the_first_token_does_not_wait_for_the_bucket_of_the_others(tiny_bundle, engine, monkeypatch):
    other = Engine.open(tiny_bundle, options=engine.options, warm_up=False)
    build, may_go_on = BucketTable._build, threading.Event()

    def slow(table, bucket):
        if isinstance(bucket, DecodeBucket):
            assert may_go_on.wait(60)
        return build(table, bucket)

    monkeypatch.setattr(BucketTable, "_build", slow)
    try:
        other.warm_up(prompt_tokens=len(PROMPT), max_tokens=20)
        generation = other.stream(PROMPT, config())
        next(generation)
        assert len(generation.tokens) == 1
    finally:
        may_go_on.set()
    assert generation.result().tokens == engine.generate(PROMPT, config()).tokens


def test_missing_kernels_are_noticed_once(tmp_path, monkeypatch, caplog):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", weights="int8")
    none = Kernels("xla", "they were not built", missing=True)
    monkeypatch.setattr("jaxllm.serving.opening.loading.native.kernels", lambda: none)
    for _ in range(2):
        Engine.open(path, warm_up=False)
    (record,) = [each for each in caplog.records if each.name == "jaxllm"]
    assert "they were not built" in record.getMessage()
    assert "C++ compiler" in record.getMessage()


def test_an_engine_that_cannot_be_made_ready_is_closed(engine, monkeypatch):
    closed = []
    close = LoadedModel.close
    monkeypatch.setattr(LoadedModel, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr(Engine, "warm_up", Mock(side_effect=ConfigError("there is no compiler")))
    with pytest.raises(ConfigError, match="no compiler"):
        Engine.open(engine.model.bundle.path, options=dataclasses.replace(engine.options, buckets_bytes=0))
    assert len(closed) == 1


# Chunks of prompts.


@pytest.mark.parametrize("lengths", [(16,), (16, 32, 64), (32, 128, 512)])
def test_chunks_cover_a_prompt_as_cheaply_as_the_best_of_all_plans(lengths):
    def cost(plan):
        return sum(plan) + _PASS_TOKENS * len(plan)

    for tokens in range(1, 1200):
        plan = plan_chunks(tokens, lengths)
        assert set(plan) <= set(lengths)
        # Only the last is padded.
        assert sum(plan[:-1]) < tokens <= sum(plan)
        if tokens <= 128:
            several = (itertools.combinations_with_replacement(lengths, count) for count in range(1, 9))
            every = (each for each in itertools.chain(*several) if sum(each) >= tokens)
            assert cost(plan) == min(map(cost, every)), tokens


# Options of engines.


def test_resolve_chooses_for_the_model_and_device():
    options = EngineOptions().resolve(TINY, backend="cpu")
    assert options.context_tokens == TINY.window_tokens
    assert options.cache_tokens[-1] == TINY.window_tokens
    assert options.activation_dtype == "float32"
    assert EngineOptions().resolve(TINY, backend="gpu").activation_dtype == "bfloat16"
    once = EngineOptions(context_tokens=32).resolve(TINY)
    assert once.resolve(TINY) == once
    lengths = EngineOptions(context_tokens=TINY.window_tokens).resolve(TINY).cache_tokens
    assert all(a < b <= 4 * a for a, b in itertools.pairwise(lengths))
    # No chunk is useless.
    assert EngineOptions(context_tokens=20).resolve(TINY, backend="cpu").chunk_tokens == (16,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(context_tokens=-1), "context_tokens"),
        (dict(chunk_tokens=(17,)), "among"),
        (dict(chunk_tokens=(64, 16)), "ascending"),
        (dict(cache_tokens=(64, 32)), "ascending"),
        (dict(cache_tokens=(0, 32)), "each of cache_tokens must be a whole number of at least 1"),
        (dict(batch_rows=(3,)), r"batch_rows must be among \(2, 4, 8\)"),
        (dict(decode_block=100000), "decode_block"),
        (dict(activation_dtype="float64"), "activation_dtype"),
        (dict(buckets_bytes=-1), "buckets_bytes"),
        # By themselves they may be, for this model they may not.
        (dict(context_tokens=TINY.window_tokens + 1), "window"),
        (dict(context_tokens=64, cache_tokens=(16, 32)), "must equal context_tokens"),
    ],
)
def test_bad_options_say_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options).resolve(TINY)


def test_how_much_is_kept_is_an_option_before_it_is_an_environment_variable(monkeypatch):
    monkeypatch.delenv("JAXLLM_BUCKETS_BYTES", raising=False)
    assert EngineOptions().resolve(TINY).buckets_bytes == 1 << 30
    monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "123")
    assert EngineOptions().resolve(TINY).buckets_bytes == 123
    assert EngineOptions(buckets_bytes=0).resolve(TINY).buckets_bytes == 0
    monkeypatch.setenv("JAXLLM_BUCKETS_BYTES", "1 GiB")
    with pytest.raises(ConfigError, match="JAXLLM_BUCKETS_BYTES must be a number of bytes"):
        EngineOptions().resolve(TINY)
