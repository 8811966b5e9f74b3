"""A new prompt's first tokens are computed while its context is restored, as they would be afterwards."""

import numpy as np
import pytest

from jaxllm.errors import CheckpointError
from jaxllm.kernels import native
from jaxllm.serving.contexts.restore import InPlace
from tests.serving.contexts.talking import READ, TURNS, answers_without_contexts, begun, new, say
from tests.serving.contexts.test_restore import COMPUTE

CODED = [False, pytest.param(True, marks=pytest.mark.skipif(not native.kernels().native, reason="native"))]
# A prompt of more than one chunk of at most 32 tokens.
LONG = TURNS[1][0] + TURNS[2][2]


def swapped_out(contexts, context, evicted=slice(None)):
    """Has some chunks of a context on storage alone, and its cache gone."""
    contexts.store.wait()
    contexts._forget_cache(context.name)
    there = contexts.memory.chunks(context.name)
    for chunk in sorted(there)[evicted]:
        contexts.memory._drop(context.name, chunk)
    return contexts._delays


@pytest.mark.parametrize("coded", CODED)
def test_what_is_answered_and_counted_stays(kept, coded, compiles):
    turns, records = [TURNS[0][0], TURNS[0][1], LONG, TURNS[0][1]], []
    for overlap in (True, False):
        contexts = kept(coded=coded, overlap_prompt=overlap, share_beginnings=False)
        wanted = answers_without_contexts(contexts.engine, turns)
        context = new(contexts)
        with compiles() as count:
            for turn, answer in zip(turns, wanted, strict=True):
                held, tokens = len(context.record.bits), len(context.tokens)
                # Some chunks stay in memory.
                swapped_out(contexts, context, slice(1, None))[100] = READ
                said = say(context, turn)
                assert said.tokens == answer
                how = said.restoration
                assert how.read == tuple(range(1, held))
                fed = min(32, tokens - 16 * held + len(turn)) if overlap and held > 1 else 0
                assert how.fed_tokens == fed
                assert said.reused_tokens == 16 * held
                assert said.ttft_ms >= how.took_ms >= how.fed_ms
                assert (how.fed_ms > 0) == (fed > 0)
            assert count() == 0
        assert contexts.store.verify() == []
        records.append(context.record)
    first, second = records
    assert first.bits == second.bits
    np.testing.assert_allclose(first.mass, second.mass, rtol=1e-4)
    assert first.seen == second.seen


@pytest.mark.parametrize("coded", CODED)
def test_chunks_are_computed_and_read_beside_the_prompt(kept, coded):
    contexts = kept(coded=coded)
    turns = [LONG, TURNS[0][1]]
    wanted = answers_without_contexts(contexts.engine, turns)
    context = new(contexts)
    say(context, LONG)
    # As many as a bucket takes are computed, the others are read.
    swapped_out(contexts, context)
    contexts._delays[100] = COMPUTE
    said = say(context, turns[1])
    assert said.tokens == wanted[1]
    assert said.restoration.read
    assert said.restoration.computed
    assert said.restoration.fed_tokens


def test_nothing_is_fed_where_all_is_in_memory_or_all_is_lost(kept):
    contexts, context, wanted = begun(kept)
    swapped_out(contexts, context, slice(0, 0))
    resident = say(context, TURNS[0][1])
    assert (resident.tokens, resident.restoration.fed_tokens) == (wanted[1], 0)
    contexts.store.wait()
    record = context.record
    contexts.memory.cut(context.name, 0)
    contexts._forget_cache(context.name)
    contexts.store.commit(record.lose(set(range(len(record.bits)))))
    lost = say(context, TURNS[0][2])
    assert (lost.tokens, lost.restoration.fed_tokens) == (wanted[2], 0)


@pytest.mark.parametrize("coded", CODED)
def test_damage_is_noticed_in_the_middle_of_a_prompt(kept, coded, monkeypatch):
    """The answer is the same: what is damaged is computed."""
    contexts = kept(coded=coded)
    wanted = answers_without_contexts(contexts.engine, [LONG, TURNS[0][1]])
    context = new(contexts)
    say(context, LONG)
    swapped_out(contexts, context)[100] = READ
    (path,) = (contexts.store.root / "app-mail" / context.name).glob("*.kv")
    data = bytearray(path.read_bytes())
    # In the last layer, when the first ones have been computed.
    data[-2000] ^= 1
    path.write_bytes(data)
    said = say(context, TURNS[0][1])
    assert said.tokens == wanted[1]
    assert said.restoration.computed
    assert set(contexts.memory.chunks(context.name)) >= set(said.restoration.read)


def test_memory_of_coming_chunks_takes_what_fits_alone(kept):
    chunk_io = kept()._chunk_io[100]
    memory = InPlace(chunk_io, {3: chunk_io.widths[0]})
    small = {3: (chunk_io.widths[0], np.zeros(5, np.uint8))}
    with pytest.raises(CheckpointError, match="chunk 3 has 5 bytes in layer 1"):
        memory.filled(lambda _: small)(1)
