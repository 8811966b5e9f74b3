"""Models of which only a part is in memory answer as if all of it were."""

import concurrent.futures
import dataclasses
import os
import re

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import BudgetExceeded, BundleError, CheckpointError, ConfigError
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig, Session
from jaxllm.serving.host.direct_io import PieceReader
from jaxllm.serving.weights import pieces
from tests.kernels.switching import needs_native
from tests.serving.memory import budget
from tests.serving.weights.conftest import CFG, OPTIONS

PROMPT = "the hello there, hello the"
CONFIG = GenerationConfig(max_tokens=24, ignore_eos=True)


def open_streamed(path, engine, share=0.6, **options):
    options = {"memory_bytes": budget(engine, share), **options}
    return Engine.open(path, options=dataclasses.replace(OPTIONS, **options), warm_up=False)


def answer(engine, config=CONFIG, prompt=PROMPT, **more):
    runner = engine.runner if (level := more.get("level")) is None else engine.runner_at(level)
    runner.fill(runner.buckets_for(len(engine.tokenizer.encode(prompt)), config.max_tokens))
    return engine.stream(prompt, config, **more).result().tokens


@pytest.fixture(scope="module")
def shared(bundle_of, resident_of):
    """Weights of eight bits of which a part is in memory."""
    engine = open_streamed(bundle_of(), resident_of())
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights", ["f32", "bf16", "int8", "int8-nested", pytest.param("int4", marks=pytest.mark.campaign)]
)
def test_the_answer_is_that_of_the_whole_model(bundle_of, resident_of, weights):
    whole = resident_of(weights)
    streamed = open_streamed(bundle_of(weights), whole)
    plan, counts = streamed.model.streamed.plan, streamed.model.streamed.counts
    assert plan.slots == 2
    assert 0 < len(plan.resident) < CFG.layers
    assert plan.planned_bytes <= plan.budget_bytes
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.8, seed=3, repetition_penalty=1.1))
    for config in (CONFIG, drawn):
        assert answer(streamed, config) == answer(whole, config)
    assert counts.read_bytes > 24 * (streamed.model.bundle.weight_bytes - plan.resident_bytes) // 2
    if weights == "f32":
        table, places = streamed.model.streamed.rows([3, 250, 3, 17])
        rows = np.asarray(whole.model.bundle.load()["embed.tokens"])[[3, 250, 3, 17]]
        np.testing.assert_array_equal(np.asarray(table)[places[0]], rows)
    streamed.close()


def test_a_long_prompt_reads_each_layer_once(resident_of, shared):
    prompt = "the hello " * 20
    one = dataclasses.replace(CONFIG, max_tokens=1)
    assert len(shared.tokenizer.encode(prompt)) > 2 * OPTIONS.chunk_tokens[-1]
    answer(shared, one, prompt)
    before = shared.model.streamed.counts.read_bytes
    assert answer(shared, one, prompt) == answer(resident_of(), one, prompt)
    assert shared.model.streamed.counts.read_bytes - before <= 2 * shared.model.bundle.weight_bytes


@pytest.mark.slow
def test_a_conversation_goes_on_and_a_stop_string_ends_it(resident_of, shared):
    texts = []
    shared.warm_up()
    built = dict(shared.runner.buckets.bucket_ms)
    for engine in (resident_of(), shared):
        engine.runner.fill(engine.runner.buckets_for())
        session = Session()
        first = engine.stream(PROMPT, CONFIG, session=session).result()
        stop = dataclasses.replace(CONFIG, stop=(first.text[5:7],))
        second = engine.stream(first.text[:5] + " the", stop, session=session).result()
        texts.append((first.text, second.text, second.finish_reason, second.reused_tokens))
    assert texts[0] == texts[1]
    # Nothing compiles after the warm-up.
    for prompt in ("the", "hello " * 10, "the hello " * 20):
        shared.generate(prompt, CONFIG)
    assert shared.runner.buckets.bucket_ms == built


@pytest.mark.slow
@pytest.mark.parametrize("weights", [pytest.param("f32", marks=pytest.mark.campaign), "int8", "int8-nested"])
def test_a_level_reads_only_its_part(bundle_of, weights, monkeypatch):
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


def test_the_least_budget_is_the_same_at_every_try_and_enough(bundle_of, resident_of):
    def opened(memory_bytes):
        options = dataclasses.replace(OPTIONS, memory_bytes=memory_bytes)
        return Engine.open(bundle_of(), options=options, warm_up=False)

    def least(memory_bytes):
        with pytest.raises(BudgetExceeded, match="give more") as caught:
            opened(memory_bytes)
        return int(re.search(r"needs at least ([\d,]+) ", str(caught.value))[1].replace(",", ""))

    enough = least(1)
    assert {least(enough // 3), least(enough // 2), least(enough - 1)} == {enough}
    engine = opened(enough)
    assert engine.model.streamed is not None
    engine.close()
    # One for all of it streams nothing.
    assert open_streamed(bundle_of(), resident_of(), 1.01).model.streamed is None
    with pytest.raises(ConfigError, match="memory_bytes must be a whole number of at least 0"):
        dataclasses.replace(OPTIONS, memory_bytes=-1)


def test_storage_that_fails_ends_one_answer_not_the_service(shared, monkeypatch):
    expected = answer(shared)
    preadv, broken = os.preadv, [False]

    def failing(*arguments):
        if broken[0]:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    session = Session()
    answering = shared.stream(PROMPT, CONFIG, session=session)
    next(answering)
    broken[0] = True
    with pytest.raises(CheckpointError, match="Input/output error"):
        answering.result()
    with pytest.raises(CheckpointError, match="Input/output error"):
        answer(shared)
    broken[0] = False
    assert answer(shared) == expected
    assert answer(shared, session=session) == expected
    # Nor does an answer that is left harm a later one.
    for count in (1, 3):
        answering = shared.stream(PROMPT, CONFIG)
        for _ in range(count):
            next(answering)
        answering.close()
        assert answer(shared) == expected


def test_threads_share_an_engine(bundle_of, resident_of):
    streamed, prompts = open_streamed(bundle_of(), resident_of()), [PROMPT, "the", "hello there, the hello"]
    expected = [answer(streamed, prompt=prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda prompt: streamed.generate(prompt, CONFIG).tokens, 4 * prompts, timeout=60)
        assert list(found) == 4 * expected
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
    path, raw = tmp_path / "own.jaxllm", bundle_of().read_bytes()
    path.write_bytes(raw)
    engine = open_streamed(path, resident_of(), 0.7)
    streamed = engine.model.streamed
    streamed.resize(0)
    number = streamed.plan.resident[0]
    at = streamed._stream._whole[number].ranges[0].offset
    write_in_place(path, at, bytes([raw[at] ^ 1]))
    with pytest.raises(BundleError, match="changed in place"):
        streamed.resize(streamed.plan.resident_bytes)
    assert number not in streamed._stream.staying()
    engine.close()
    # Before it is opened, it is a damaged one.
    with pytest.raises(BundleError, match=rf"layers\.{number}.* is corrupt"):
        open_streamed(path, resident_of())


# A bundle is read once when it is opened, and later reads are believed only where they bring the same.


def test_opening_reads_the_file_once_and_again_where_storage_erred(bundle_of, resident_of, monkeypatch):
    read_into, wrong, read = PieceReader.read_into, set(), []

    def counting(reader, memory, place, offset, size):
        read.append(size)
        read_into(reader, memory, place, offset, size)

    with monkeypatch.context() as patch:
        patch.setattr(PieceReader, "read_into", counting)
        streamed = open_streamed(bundle_of(), resident_of(), 0.9)
    assert streamed.model.streamed.plan.resident_bytes > streamed.model.bundle.weight_bytes / 4
    # Norms are read by themselves.
    assert sum(read) < 1.1 * streamed.model.bundle.weight_bytes
    streamed.close()

    def erring(reader, memory, place, offset, size):
        """Gives each place of the file wrongly at first, and right from then on."""
        read_into(reader, memory, place, offset, size)
        if (offset, size) not in wrong:
            wrong.add((offset, size))
            memory[place] ^= 1

    monkeypatch.setattr(PieceReader, "read_into", erring)
    streamed = open_streamed(bundle_of(), resident_of())
    opened = len(wrong)
    assert answer(streamed) == answer(resident_of())
    assert len(wrong) > opened > 0
    streamed.close()


def write_in_place(path, offset, data):
    """Changes a file as something that does not want to be noticed."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@pytest.mark.parametrize("part", ["layer", "level", "rows", pytest.param("low", marks=needs_native)])
def test_what_is_read_is_what_was_there_at_first(bundle_of, resident_of, tmp_path, part):
    path, weights = tmp_path / "served.jaxllm", "int8-nested" if part == "low" else "int8"
    path.write_bytes(bundle_of(weights).read_bytes())
    streamed = open_streamed(path, resident_of(weights), levels=(40,))
    level = {"level": 40} if part == "level" else {}
    expected = answer(streamed, **level)
    layout, stays = streamed.model.bundle.layout, streamed.model.streamed.plan.resident
    layer = next(each for each in range(CFG.layers) if each not in stays)
    names = {"rows": layout.tensors["embed.tokens"].segment, "low": f"layers.{layer}.low"}
    segment = layout.segments[names.get(part, f"layers.{layer}")]
    kept = path.read_bytes()
    # Bytes that a level has, too, and rows of all tokens.
    size = 64 if part != "rows" else segment.size_bytes
    other = bytes(each ^ 1 for each in kept[segment.offset : segment.offset + size])
    write_in_place(path, segment.offset, other)
    with pytest.raises(BundleError, match=r"changed in place .*: .* renaming another one over it"):
        # Rows that were read before are not read again.
        streamed.model.streamed.rows(range(100, 200)) if part == "rows" else answer(streamed, **level)
    write_in_place(path, 0, kept)
    assert answer(streamed, **level) == expected
    # A file that has become shorter ends an answer, too.
    facts = path.stat()
    os.truncate(path, segment.offset)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(CheckpointError):
        answer(streamed, **level)
    streamed.close()
