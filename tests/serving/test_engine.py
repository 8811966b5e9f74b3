"""The engine against the plainest possible loop, and what a request may and may not do."""

import concurrent.futures
import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig, Sampling
from jaxllm.errors import BucketMissing, ConfigError, ContextOverflow
from jaxllm.kernels.native import Kernels
from jaxllm.models.decoder import forward, logits
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.cache import StartBucket
from jaxllm.serving.buckets.decode import DecodeBucket, SampleBucket
from jaxllm.serving.buckets.prefill import PrefillBucket
from jaxllm.serving.engine.request import Session
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.weights.model_level import ModelLevel
from tests.tiny import write_tiny_bundle

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


def test_a_sequence_that_outgrows_its_cache_goes_on_unharmed(engine, greedy):
    generation = engine.generate(PROMPT, config(max_tokens=100))
    assert generation.tokens == greedy(PROMPT, 100)


def test_the_window_ends_an_answer(engine, greedy):
    room = engine.options.context_tokens - len(PROMPT) + 1
    generation = engine.generate(PROMPT, config(max_tokens=10_000))
    assert len(generation.tokens) == room
    assert generation.finish_reason == "length"
    assert generation.tokens[:-1] == greedy(PROMPT, room - 1)


def test_a_prompt_as_long_as_the_context_gets_one_token(engine):
    prompt = [7] * engine.options.context_tokens
    assert len(engine.generate(prompt, config()).tokens) == 1


@pytest.mark.parametrize("block", [1, 3, 8])
def test_block_size_changes_no_token(tiny_bundle, engine, block):
    options = dataclasses.replace(engine.options, decode_block=block)
    other = Engine.open(tiny_bundle, options=options, warm_up=False)
    other.warm_up(prompt_tokens=len(PROMPT), max_tokens=30)
    sampled = config(max_tokens=30, sampling=Sampling(temperature=1.5, top_k=50, seed=11))
    assert other.generate(PROMPT, sampled).tokens == engine.generate(PROMPT, sampled).tokens


@pytest.mark.parametrize(("tpot_ms", "first"), [(None, 1), (1000.0, 1), (5.0, 5), (1e-9, 5)])
def test_the_first_dispatch_goes_by_what_a_token_should_take(engine, monkeypatch, tpot_ms, first):
    whole = engine.generate(PROMPT, config(max_tokens=6)).tokens
    limits = []
    limit_of = type(engine.runner).decode_limit

    def seen(table, pace, remaining):
        limits.append(limit_of(table, pace, remaining))
        return limits[-1]

    monkeypatch.setattr(type(engine.runner), "decode_limit", seen)
    generation = engine.stream(PROMPT, config(max_tokens=6), tpot_ms=tpot_ms).result()
    assert generation.tokens == whole
    assert limits[0] == min(first, engine.options.decode_block)


def test_pieces_add_up_to_the_text(engine):
    generation = engine.stream(PROMPT, config(max_tokens=60))
    assert "".join(generation) == generation.text == engine.tokenizer.decode(generation.tokens)


def test_stop_string_is_never_shown_and_ends_the_answer(engine):
    whole = engine.generate(PROMPT, config(max_tokens=40)).text
    assert len(whole) > 12
    stop = whole[9:12]
    generation = engine.stream(PROMPT, config(max_tokens=40, stop=(stop,)))
    pieces = list(generation)
    assert "".join(pieces) == generation.text == whole[: whole.index(stop)]
    assert generation.finish_reason == "stop"
    assert generation.stop_string == stop


def test_nothing_behind_a_stop_string_stays_in_the_session(engine):
    session = Session()
    whole = engine.generate(PROMPT, config(max_tokens=40)).text
    generation = engine.stream(PROMPT, config(max_tokens=40, stop=(whole[4:6],)), session=session)
    generation.result()
    assert session.tokens == (PROMPT + generation.tokens)[: len(session.tokens)]
    assert len(session.tokens) >= len(PROMPT) + len(generation.tokens) - 1


def test_stop_token_ends_the_answer_and_is_not_text(engine, greedy):
    expected = greedy(PROMPT, 20)
    stop = expected[12]
    generation = engine.generate(PROMPT, config(max_tokens=40, stop_token_ids=(stop,)))
    end = expected.index(stop)
    assert generation.tokens == expected[: end + 1]
    assert generation.finish_reason == "stop"
    assert generation.text == engine.tokenizer.decode(expected[:end])


def test_eos_ends_an_answer_unless_ignored(engine):
    eos = engine.tokenizer.eos_ids[0]
    always_eos = Sampling(logit_bias=((eos, 1e6),))
    stopped = engine.generate(PROMPT, GenerationConfig(max_tokens=5, sampling=always_eos))
    assert (stopped.tokens, stopped.finish_reason, stopped.text) == ([eos], "stop", "")
    ignored = engine.generate(PROMPT, config(max_tokens=5, sampling=always_eos))
    assert (ignored.tokens, ignored.finish_reason) == ([eos] * 5, "length")


def test_same_seed_same_answer_and_the_seed_is_told(engine):
    sampled = config(max_tokens=30, sampling=Sampling(temperature=2.0))
    first = engine.generate(PROMPT, sampled)
    again = config(max_tokens=30, sampling=Sampling(temperature=2.0, seed=first.seed))
    assert engine.generate(PROMPT, again).tokens == first.tokens
    other = config(max_tokens=30, sampling=Sampling(temperature=2.0, seed=first.seed ^ 1))
    assert engine.generate(PROMPT, other).tokens != first.tokens


def test_a_session_feeds_only_what_is_new_and_answers_the_same(engine):
    session = Session()
    first = engine.stream(PROMPT, config(max_tokens=10), session=session).result()
    turn = [*PROMPT, *first.tokens, 21, 22, 23]
    second = engine.stream(turn, config(max_tokens=10), session=session).result()
    # All but the answer's last token, which was never fed, and the new turn.
    assert second.reused_tokens == len(PROMPT) + len(first.tokens) - 1
    assert second.tokens == engine.generate(turn, config(max_tokens=10)).tokens


def test_a_session_whose_history_was_edited_forgets_the_rest(engine):
    session = Session()
    engine.stream(PROMPT, config(max_tokens=10), session=session).result()
    edited = [*PROMPT[:4], 60, 61, 62]
    generation = engine.stream(edited, config(max_tokens=10), session=session).result()
    assert generation.reused_tokens == 4
    assert generation.tokens == engine.generate(edited, config(max_tokens=10)).tokens


def test_an_answer_closed_early_leaves_a_usable_session(engine):
    session = Session()
    generation = engine.stream(PROMPT, config(max_tokens=60), session=session)
    next(generation)
    generation.close()
    assert generation.finish_reason is None
    turn = [*PROMPT, *generation.tokens, 30]
    again = engine.stream(turn, config(max_tokens=8), session=session).result()
    assert again.reused_tokens >= len(PROMPT)
    assert again.tokens == engine.generate(turn, config(max_tokens=8)).tokens


def test_a_failed_dispatch_empties_the_session(engine, monkeypatch):
    session = Session()
    engine.stream(PROMPT, config(max_tokens=4), session=session).result()

    def broken(*args, **kwargs):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "prefill", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            engine.stream(PROMPT, config(), session=session).result()
    # The cache was given away: nothing may claim to be in it.
    assert (session.tokens, session.cache) == ([], None)
    answer = engine.stream(PROMPT, config(max_tokens=4), session=session).result()
    assert answer.tokens == engine.generate(PROMPT, config(max_tokens=4)).tokens


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", ConfigError, "empty"),
        ([], ConfigError, "empty"),
        ([1] * 129, ContextOverflow, "129 tokens"),
        ([-1], ConfigError, "vocabulary"),
        ([10**6], ConfigError, "vocabulary"),
    ],
)
def test_bad_prompts_are_refused_with_a_reason(engine, prompt, error, message):
    with pytest.raises(error, match=message):
        engine.stream(prompt)


def test_too_many_stop_tokens_are_refused(engine):
    with pytest.raises(ConfigError, match="stop tokens"):
        engine.stream(PROMPT, config(stop_token_ids=tuple(range(17))))


@pytest.mark.parametrize("max_tokens", [0, -3, 1.5])
def test_max_tokens_must_be_positive(max_tokens):
    with pytest.raises(ConfigError, match="max_tokens"):
        GenerationConfig(max_tokens=max_tokens)


def test_chat_goes_through_the_template(engine):
    messages = [{"role": "user", "content": "hello"}]
    ids = engine.tokenizer.encode_chat(messages)
    assert engine.chat(messages, config()).result().tokens == engine.generate(ids, config()).tokens


def test_a_missing_bucket_raises_instead_of_compiling(engine):
    model = ModelLevel(engine.cfg, engine.model.bundle.load(), engine.options)
    empty = ResidentRunner(model, BucketTable(model.shapes))
    with pytest.raises(ContextOverflow, match="do not fit"):
        empty.start(10)
    some = engine.runner.start(10)
    with pytest.raises(BucketMissing, match="PrefillBucket"):
        prefill_prompt(empty, some, PROMPT, 0)


def test_nothing_compiles_after_warm_up(engine, compiles):
    rng = np.random.default_rng(0)
    session = Session()
    with compiles() as count:
        for _ in range(100):
            length = int(rng.integers(1, engine.options.context_tokens))
            prompt = rng.integers(0, engine.cfg.vocab_size, length).tolist()
            sampling = Sampling(temperature=float(rng.integers(2)), top_p=0.9, top_k=5)
            request = config(max_tokens=int(rng.integers(1, 40)), sampling=sampling)
            engine.stream(prompt, request, session=session).result()
            if rng.integers(2):
                session = Session()
    assert count() == 0


def test_the_compile_counter_counts(compiles):
    with compiles() as count:
        jax.jit(lambda x: x * 3 + 1).lower(np.float32(1)).compile()
    assert count() == 1


def test_one_request_compiles_only_what_it_needs(tiny_bundle):
    options = EngineOptions(context_tokens=128, chunk_tokens=(16, 32), cache_tokens=(32, 128))
    engine = Engine.open(tiny_bundle, options=options, warm_up=False)
    engine.warm_up(prompt_tokens=8, max_tokens=20)
    assert len(engine.generate(PROMPT, config(max_tokens=20)).tokens) == 20
    assert set(engine.runner.buckets.bucket_ms) == {
        PrefillBucket(tokens=16, cache_tokens=32),
        DecodeBucket(block_tokens=options.decode_block, cache_tokens=32),
        SampleBucket(),
        StartBucket(cache_tokens=32),
    }


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


def test_one_token_needs_no_bucket_for_others(tiny_bundle, engine):
    other = Engine.open(tiny_bundle, options=engine.options, warm_up=False)
    other.warm_up(prompt_tokens=len(PROMPT), max_tokens=1)
    first = other.generate(PROMPT, config(max_tokens=1))
    assert first.tokens == engine.generate(PROMPT, config(max_tokens=1)).tokens
    families = {type(bucket) for bucket in other.runner.buckets.bucket_ms}
    assert families == {PrefillBucket, SampleBucket, StartBucket}


def test_a_bucket_that_failed_to_build_may_be_asked_for_again(tiny_bundle, engine, monkeypatch):
    other = Engine.open(tiny_bundle, options=engine.options, warm_up=False)

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(BucketTable, "_build", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            other.warm_up(prompt_tokens=len(PROMPT), max_tokens=20)
        concurrent.futures.wait(other.runner.buckets._pending.values())
    other.runner.fill(other.runner.request_buckets(len(PROMPT), 20))
    assert other.generate(PROMPT, config()).tokens == engine.generate(PROMPT, config()).tokens


def test_buckets_update_the_cache_in_place(engine):
    cache = engine.runner.start(1)
    cache_bytes = sum(leaf.nbytes for leaf in (*cache.keys, *cache.values))
    capacity = cache.capacity_tokens
    for bucket in (
        PrefillBucket(tokens=16, cache_tokens=capacity),
        DecodeBucket(block_tokens=8, cache_tokens=capacity),
    ):
        memory = engine.runner.buckets.get(bucket).memory_analysis()
        assert memory.alias_size_in_bytes >= cache_bytes, bucket


def test_rehearsal_runs_every_bucket_and_leaves_no_trace(tiny_bundle, engine, monkeypatch):
    other = Engine.open(tiny_bundle, options=engine.options, warm_up=False)
    other.runner.fill(other.runner.request_buckets(len(PROMPT), 20))
    ran = []

    def spied(family, compiled):
        def run(*args):
            ran.append(family)
            return compiled(*args)

        return run

    buckets = other.runner.buckets._compiled
    with monkeypatch.context() as patch:
        for bucket, compiled in list(buckets.items()):
            patch.setitem(buckets, bucket, spied(type(bucket), compiled))
        other.runner.rehearse()
    assert set(ran) == {StartBucket, PrefillBucket, SampleBucket, DecodeBucket}
    assert other.generate(PROMPT, config()).tokens == engine.generate(PROMPT, config()).tokens


@pytest.mark.parametrize("token", [-1, 1 << 40, 2.5])
def test_stop_tokens_must_be_token_ids(token):
    with pytest.raises(ConfigError, match="stop_token_ids"):
        config(stop_token_ids=(token,))


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

    def fails(self, **_):
        raise ConfigError("there is no compiler")

    monkeypatch.setattr(Engine, "warm_up", fails)
    with pytest.raises(ConfigError, match="no compiler"):
        Engine.open(engine.model.bundle.path, options=dataclasses.replace(engine.options, buckets_bytes=0))
    assert len(closed) == 1
