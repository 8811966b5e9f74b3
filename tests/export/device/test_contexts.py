"""Contexts on a device: swapped under a budget, restored after a restart, the same answers."""

import contextlib

import pytest

from jaxllm.contexts.codecs import RAW
from jaxllm.errors import BudgetExceeded
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import open_device, profile_path
from jaxllm.export.folder_format.manifest import LOOP, MAIN
from jaxllm.export.folder_format.signature import CHUNK_TOKENS
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.layout import SUFFIX
from jaxllm.serving.engine.request import GenerationConfig, Session
from tests.export.device.conftest import updated
from tests.export.sizes import CFG

CONFIG = GenerationConfig(max_tokens=6, ignore_eos=True)
TURNS = [[(seed * i + 3) % CFG.vocab_size for i in range(17)] for seed in (5, 7, 11)]
CHUNK_BYTES = 2 * 4 * CFG.layers * CFG.kv_heads * CHUNK_TOKENS * CFG.head_dim


@pytest.fixture
def contexts(engine, tmp_path):
    with reopened(engine, tmp_path) as with_room:
        yield with_room


def created(contexts, **options):
    return Context(contexts, contexts.create("app", **options))


def opened(contexts, name):
    return Context(contexts, contexts.record("app", name))


@contextlib.contextmanager
def reopened(engine, tmp_path, budget_bytes=1 << 20):
    """The contexts of the store, as another process has them."""
    again = ProgramContexts(engine, tmp_path / "store", budget_bytes=budget_bytes)
    yield again
    again.close()


def begun(contexts, turn):
    """The name of a context with one turn, and the turn's answer; the process has ended."""
    context = created(contexts)
    answer = context.answer(turn, CONFIG).result()
    contexts.close()
    return context.name, answer


def go_on(contexts, name):
    return opened(contexts, name).answer(TURNS[0][:5], CONFIG).result()


def uninterrupted(engine, first, level=100):
    """The answers of two turns in one session."""
    session, found = Session(), []
    sequence = []
    for turn in (first, TURNS[0][:5]):
        sequence += turn
        answer = engine.stream(sequence, CONFIG, session=session, level=level).result()
        found.append(answer.tokens)
        sequence = list(answer.sequence)
    return found


def test_three_contexts_in_a_budget_of_four_chunks(engine, tmp_path):
    wanted = [uninterrupted(engine, turn) for turn in TURNS]
    with reopened(engine, tmp_path, 4 * CHUNK_BYTES) as contexts:
        made = [created(contexts) for _ in TURNS]
        first = [each.answer(turn, CONFIG).result() for each, turn in zip(made, TURNS, strict=True)]
        assert [each.tokens for each in first] == [each[0] for each in wanted]
        assert contexts.memory.resident_bytes <= 4 * CHUNK_BYTES
        second = [each.answer(TURNS[0][:5], CONFIG).result() for each in made]
        assert [each.tokens for each in second] == [each[1] for each in wanted]
        assert contexts.memory.evicted > 0
        assert [each.reused_tokens for each in second] == [CHUNK_TOKENS] * 3
    with reopened(engine, tmp_path, CHUNK_BYTES - 1) as none, pytest.raises(BudgetExceeded):
        created(none).answer(TURNS[0], CONFIG).result()


def test_a_level_of_its_own(engine, contexts):
    context = created(contexts, level=40)
    found = [context.answer(turn, CONFIG).result().tokens for turn in (TURNS[0], TURNS[0][:5])]
    assert found == uninterrupted(engine, TURNS[0], level=40)


def test_a_restart_restores_to_the_bit(engine, contexts, tmp_path):
    name, answer = begun(contexts, TURNS[1])
    rows = engine.runner.rows(answer.session.cache, CHUNK_TOKENS)
    with reopened(engine, tmp_path) as again:
        answer = go_on(again, name)
        assert answer.tokens == uninterrupted(engine, TURNS[1])[1]
        assert (answer.restoration.resident, answer.restoration.read) == (0, (0,))
        assert (answer.restoration.computed, answer.reused_tokens) == ((), CHUNK_TOKENS)
        restored = engine.runner.rows(answer.session.cache, CHUNK_TOKENS)
        assert all((rows[each] == restored[each]).all() for each in rows)


def test_a_damaged_chunk_is_computed_again(engine, contexts, tmp_path):
    name, _ = begun(contexts, TURNS[2])
    (segment,) = (tmp_path / "store").rglob(f"*{SUFFIX}")
    raw = bytearray(segment.read_bytes())
    raw[-1000] ^= 255
    raw[4096] ^= 255
    segment.write_bytes(raw)
    with reopened(engine, tmp_path) as again:
        answer = go_on(again, name)
        assert answer.tokens == uninterrupted(engine, TURNS[2])[1]
        assert answer.restoration.read == ()
        # The chunk is stored anew, beside the next.
        assert again.record("app", name).bits == (RAW, RAW)


def test_updates_of_the_loop_and_of_the_programs(engine, folder, contexts, tmp_path):
    """One of the loop leaves chunks and profile. A context of other programs is computed again from its
    tokens; until then it is as it was: its own programs find its chunks."""

    name, _ = begun(contexts, TURNS[1])
    changed = {LOOP: b"modules", MAIN: b"what starts them"}
    loop = open_device(updated(folder, tmp_path / "loop", **changed))
    assert profile_path(loop) == profile_path(engine)
    with reopened(loop, tmp_path) as again:
        answer = go_on(again, name)
        assert (answer.restoration.read, answer.restoration.moved) == ((0,), ())
        sequence = list(answer.sequence)
    other = open_device(updated(folder, tmp_path / "other", **{"more.weights": b"of a new version"}))
    assert profile_path(other) != profile_path(engine)
    with reopened(other, tmp_path) as again:
        assert len(opened(again, name).tokens) == len(sequence)
    with reopened(engine, tmp_path) as back:
        assert back.record("app", name).bits == (RAW, RAW)
    with reopened(other, tmp_path) as again:
        answer = go_on(again, name)
        assert answer.tokens == engine.generate([*sequence, *TURNS[0][:5]], CONFIG).tokens
        assert answer.restoration.moved == ("model",)
        assert opened(again, name).answer([5], CONFIG).result().restoration.moved == ()
