"""Models of which only a part is in memory answer as if all of it were."""

import dataclasses
import os
import re
import threading

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import BudgetExceeded, BundleError, CheckpointError, ConfigError
from jaxllm.models.features import room_refusal
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.weights import pieces
from tests.kernels.switching import fall_back
from tests.models.configs import CONFIGS
from tests.serving.weights.conftest import CFG, OPTIONS, budget
from tests.tiny import VOCAB_SIZE, WINDOW_TOKENS

PROMPT = "the hello there, hello the"
CONFIG = GenerationConfig(max_tokens=24, ignore_eos=True)


def open_streamed(path, engine, share=0.6, **options):
    options = {"memory_bytes": budget(engine, share), **options}
    return Engine.open(path, options=dataclasses.replace(OPTIONS, **options), warm_up=False)


def answer(engine, config=CONFIG, prompt=PROMPT, **more):
    runner = engine.runner if (level := more.get("level")) is None else engine.runner_at(level)
    runner.fill(runner.request_buckets(len(engine.tokenizer.encode(prompt)), config.max_tokens))
    return engine.stream(prompt, config, **more).result().tokens


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int8-nested", "int4"])
def test_the_answer_is_that_of_the_whole_model(bundle_of, resident_of, weights):
    whole = resident_of(weights)
    streamed = open_streamed(bundle_of(weights), whole)
    plan = streamed.model.streamed.plan
    assert plan.slots == 2
    assert 0 < len(plan.resident) < CFG.layers
    assert plan.planned_bytes <= plan.budget_bytes
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))
    for config in (CONFIG, drawn):
        assert answer(streamed, config) == answer(whole, config)
    counts = streamed.model.streamed.counts
    assert counts.read_bytes > 24 * (streamed.model.bundle.weight_bytes - plan.resident_bytes) // 2
    streamed.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_architecture_streams(bundle_of, resident_of, name):
    cfg = CONFIGS[name]
    cfg = dataclasses.replace(
        cfg,
        hidden_size=64,
        vocab_size=VOCAB_SIZE,
        window_tokens=WINDOW_TOKENS,
        layers=6,
        attention_windows=3 * cfg.attention_windows,
        sparse_layers=3 * cfg.sparse_layers,
        rope_layers=3 * cfg.rope_layers,
    )
    if room_refusal(cfg, "streamed weights"):
        whole = resident_of("int8", cfg)
        with pytest.raises(ConfigError, match="not streamed"):
            open_streamed(bundle_of("int8", cfg), whole, 0.8)
        return
    whole = resident_of("int8", cfg)
    streamed = open_streamed(bundle_of("int8", cfg), whole, 0.8)
    assert streamed.model.streamed.plan.slots == 2
    assert answer(streamed, prompt="the") == answer(whole, prompt="the")
    streamed.close()


def test_a_long_prompt_reads_each_layer_once(bundle_of, resident_of):
    whole = resident_of()
    streamed = open_streamed(bundle_of(), whole)
    prompt = "the hello " * 20
    one = dataclasses.replace(CONFIG, max_tokens=1)
    assert len(streamed.tokenizer.encode(prompt)) > 2 * OPTIONS.chunk_tokens[-1]
    assert answer(streamed, one, prompt) == answer(whole, one, prompt)
    stream = streamed.model.streamed
    assert stream.counts.read_bytes <= 2 * streamed.model.bundle.weight_bytes
    streamed.close()


@pytest.mark.slow
def test_a_conversation_goes_on_and_a_stop_string_ends_it(bundle_of, resident_of):
    whole = resident_of()
    streamed = open_streamed(bundle_of(), whole)
    texts = []
    for engine in (whole, streamed):
        engine.runner.fill(engine.runner.all_buckets())
        session = Session()
        first = engine.stream(PROMPT, CONFIG, session=session).result()
        stop = first.text[5:7]
        second = engine.stream(
            first.text[:5] + " the", dataclasses.replace(CONFIG, stop=(stop,)), session=session
        ).result()
        texts.append((first.text, second.text, second.finish_reason, second.reused_tokens))
    assert texts[0] == texts[1]
    streamed.close()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["f32", "int8", "int8-nested"])
def test_a_level_reads_only_its_part(bundle_of, resident_of, weights, monkeypatch):
    # Layers so small would be read whole: a seek takes longer.
    monkeypatch.setattr(pieces, "_SHORT_GAP_BYTES", 0)
    whole = Engine.open(bundle_of(weights), options=dataclasses.replace(OPTIONS, levels=(40,)), warm_up=False)
    streamed = open_streamed(bundle_of(weights), whole, levels=(40,))
    read = []
    for level in (100, 40, 100):
        before = streamed.model.streamed.counts.read_bytes
        assert answer(streamed, level=level) == answer(whole, level=level)
        read.append(streamed.model.streamed.counts.read_bytes - before)
    assert read[1] < 0.75 * read[0]
    streamed.close()


@pytest.mark.slow
def test_without_native_kernels_it_is_the_same(bundle_of, monkeypatch):
    fall_back(monkeypatch)
    whole = Engine.open(bundle_of("int4"), options=OPTIONS, warm_up=False)
    streamed = open_streamed(bundle_of("int4"), whole)
    assert streamed.model.streamed is not None
    assert not streamed.model.bundle.read_in_place
    short = dataclasses.replace(CONFIG, max_tokens=4)
    assert answer(streamed, short) == answer(whole, short)
    streamed.close()


@pytest.mark.slow
def test_without_native_kernels_so_is_a_level(bundle_of, monkeypatch):
    fall_back(monkeypatch)
    options = dataclasses.replace(OPTIONS, levels=(40,))
    whole = Engine.open(bundle_of("int8"), options=options, warm_up=False)
    streamed = open_streamed(bundle_of("int8"), whole, levels=(40,))
    short = dataclasses.replace(CONFIG, max_tokens=4)
    assert answer(streamed, short, level=40) == answer(whole, short, level=40)
    streamed.close()


def test_a_budget_for_all_of_it_streams_nothing(bundle_of, resident_of):
    engine = open_streamed(bundle_of(), resident_of(), 1.01)
    assert engine.model.streamed is None


def test_too_small_a_budget_says_how_much_it_takes(bundle_of, resident_of):
    with pytest.raises(BudgetExceeded, match=r"needs at least [\d,]+ .*give more"):
        open_streamed(bundle_of(), resident_of(), 0.05)
    with pytest.raises(ConfigError, match="memory_bytes must be a whole number of at least 0"):
        dataclasses.replace(OPTIONS, memory_bytes=-1)


def test_the_least_budget_is_the_same_at_every_try_and_enough(bundle_of):
    def least(memory_bytes):
        with pytest.raises(BudgetExceeded) as caught:
            Engine.open(
                bundle_of(), options=dataclasses.replace(OPTIONS, memory_bytes=memory_bytes), warm_up=False
            )
        return int(re.search(r"needs at least ([\d,]+) ", str(caught.value))[1].replace(",", ""))

    enough = least(1)
    assert {least(enough // 3), least(enough // 2), least(enough - 1)} == {enough}
    options = dataclasses.replace(OPTIONS, memory_bytes=enough)
    engine = Engine.open(bundle_of(), options=options, warm_up=False)
    assert engine.model.streamed is not None
    engine.close()


def test_a_damaged_file_is_refused(bundle_of, resident_of, tmp_path):
    path = tmp_path / "damaged.jaxllm"
    raw = bytearray(bundle_of().read_bytes())
    layer = resident_of().model.bundle.layout.segments["layers.3"]
    raw[layer.offset + 100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BundleError, match=r"layers\.3.* is corrupt"):
        open_streamed(path, resident_of())


def test_storage_that_fails_ends_one_answer_not_the_service(bundle_of, resident_of, monkeypatch):
    streamed = open_streamed(bundle_of(), resident_of())
    expected = answer(streamed)
    preadv, broken = os.preadv, [False]

    def failing(*arguments):
        if broken[0]:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    session = Session()
    answering = streamed.stream(PROMPT, CONFIG, session=session)
    next(answering)
    broken[0] = True
    with pytest.raises(CheckpointError, match="Input/output error"):
        answering.result()
    with pytest.raises(CheckpointError, match="Input/output error"):
        answer(streamed)
    broken[0] = False
    assert answer(streamed) == expected
    assert answer(streamed, session=session) == expected
    streamed.close()


def test_an_answer_that_is_left_harms_no_later_one(bundle_of, resident_of):
    streamed = open_streamed(bundle_of(), resident_of())
    expected = answer(streamed)
    for count in (1, 3):
        answering = streamed.stream(PROMPT, CONFIG)
        for _ in range(count):
            next(answering)
        answering.close()
        assert answer(streamed) == expected
    streamed.close()


def test_nothing_compiles_after_the_warm_up(bundle_of, resident_of):
    streamed = open_streamed(bundle_of(), resident_of())
    streamed.warm_up()
    built = dict(streamed.runner.buckets.bucket_ms)
    for prompt in ("the", "hello " * 10, "the hello " * 20):
        streamed.generate(prompt, CONFIG)
    assert streamed.runner.buckets.bucket_ms == built
    streamed.close()


def test_rows_of_tokens_are_those_of_the_table(bundle_of, resident_of):
    streamed, whole = open_streamed(bundle_of("f32"), resident_of("f32")), resident_of("f32")
    table, places = streamed.model.streamed.rows([3, 250, 3, 17])
    rows = np.asarray(whole.model.bundle.load()["embed.tokens"])[[3, 250, 3, 17]]
    np.testing.assert_array_equal(np.asarray(table)[places[0]], rows)
    streamed.close()


def test_threads_share_an_engine(bundle_of, resident_of):
    streamed = open_streamed(bundle_of(), resident_of())
    prompts = [PROMPT, "the", "hello there, the hello"]
    expected = [answer(streamed, prompt=prompt) for prompt in prompts]
    found = []

    def ask(number):
        for turn in range(3):
            place = (number + turn) % len(prompts)
            found.append(streamed.generate(prompts[place], CONFIG).tokens == expected[place])

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert found == [True] * 12
    streamed.close()
    with pytest.raises(ConfigError, match="closed"):
        streamed.generate(PROMPT, CONFIG)


def test_layers_are_let_go_and_read_again(bundle_of, resident_of):
    whole = resident_of()
    engine = open_streamed(bundle_of(), whole, 0.7, levels=(40,))
    streamed = engine.model.streamed
    there, most = set(streamed._stream.staying()), streamed.plan.resident_bytes
    assert streamed.resizable
    assert len(there) >= 2
    for level in (100, 40):
        expected = answer(whole.at(level) if level in whole.levels else engine, level=level)
        for share in (0.5, 0.0, 0.6, 1.0):
            streamed.resize(int(share * most))
            kept = set(streamed._stream.staying())
            assert kept < there if share < 1 else kept == there
            assert streamed.resident_bytes == sum(streamed._sizes[each] for each in kept) <= share * most
            read = streamed.counts.read_bytes
            assert answer(engine, level=level) == expected
            assert streamed.counts.read_bytes > read
    assert streamed.facts()["resident_layers"] == len(there)
    engine.close()


def test_a_layer_that_was_changed_meanwhile_is_not_kept(bundle_of, resident_of, tmp_path):
    path = tmp_path / "own.jaxllm"
    path.write_bytes(bundle_of().read_bytes())
    engine = open_streamed(path, resident_of(), 0.7)
    streamed = engine.model.streamed
    streamed.resize(0)
    number = streamed.plan.resident[0]
    at = streamed._stream._whole[number].ranges[0].offset
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(BundleError, match="changed in place"):
        streamed.resize(streamed.plan.resident_bytes)
    assert number not in streamed._stream.staying()
    engine.close()
