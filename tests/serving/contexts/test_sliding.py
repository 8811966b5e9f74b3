"""Answers that outgrow the window: they go on, and what is kept of them is what a prefill of it gives."""

import numpy as np
import pytest

from jaxllm.contexts.tolerance import sightings
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.serving.engine.request import GenerationConfig, Sliding, slid
from tests.serving.contexts.talking import TURNS, C, answers_without_contexts, found, new, say

PROMPT = TURNS[0][0]


def reference(engine, prompt, count, sinks):
    """What is answered if every slide is a new request, and the sequence that is left."""
    window, sequence, said = engine.options.context_tokens, list(prompt), []
    while True:
        room = min(count - len(said), window - len(sequence) + 1)
        config = GenerationConfig(max_tokens=room, ignore_eos=True)
        fresh = engine.generate(sequence, config).tokens
        said, sequence = said + fresh, sequence + fresh
        if len(said) == count:
            return said, sequence
        sequence = sequence[:sinks] + sequence[-(window // 2 - sinks) :]


def long_answer(context, count, prompt=PROMPT):
    return context.generate(prompt, max_tokens=count, ignore_eos=True, slide=True).result()


def test_what_slides_keeps_both_ends():
    assert slid([0, 1, 2, 3, 4, 5], sink_tokens=1, most=3) == [0, 4, 5]
    assert slid([0, 1, 2, 3, 4, 5], sink_tokens=2, most=1) == [0, 1]


@pytest.mark.parametrize("sinks", [0, 4, 62])
def test_an_answer_without_a_context_slides(engine_of, sinks):
    engine = engine_of("raw")
    config = GenerationConfig(max_tokens=170, ignore_eos=True)
    answer = engine.stream(PROMPT, config, sliding=Sliding(sink_tokens=sinks)).result()
    assert (answer.tokens, answer.sequence) == reference(engine, PROMPT, 170, sinks)
    assert answer.finish_reason == "length"
    assert answer.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("sinks", [-1, 63])
def test_sinks_that_leave_no_room_are_refused(engine_of, sinks):
    with pytest.raises(ConfigError, match="tokens cannot stay"):
        engine_of("raw").stream(PROMPT, sliding=Sliding(sink_tokens=sinks))


def test_a_context_that_slid_in_an_answer_goes_on_after_a_restart(kept, compiles):
    """Token for token after several slides, and each chunk's attention is counted where it stood."""
    contexts = kept()
    context, engine = new(contexts), contexts.engine
    said, sequence = reference(engine, PROMPT, 230, C)
    with compiles() as count:
        answer = long_answer(context, 230)
        assert count() == 0
    assert answer.tokens == said
    assert context.tokens == tuple(sequence)
    record, held = context.record, len(sequence) - 1
    assert len(record.bits) == held // C
    assert sorted(contexts.memory.chunks(context.name)) == [*range(held // C)]
    assert contexts.store.verify() == []

    cfg = engine.cfg
    model = dict(heads=[cfg.heads] * cfg.layers, windows=cfg.attention_windows)
    # 37 and 92 of 230 fill the window; each time 64 stay, and 65 more fill it again.
    last = sightings(C, held, held // C, C, **model)
    whole = [sightings(first, 128, 1, C, **model)[0] for first in (0, C, C)]
    assert record.seen == pytest.approx([last[0] + sum(whole), *last[1:]])
    density = np.array(record.mass) / record.seen
    assert np.all((density > 0) & (density < 1))

    contexts = kept()
    later = say(found(contexts, context), TURNS[0][1])
    config = GenerationConfig(max_tokens=6, ignore_eos=True)
    assert later.tokens == engine.generate([*sequence, *TURNS[0][1]], config).tokens
    assert later.reused_tokens == held // C * C


@pytest.mark.parametrize("writing", ["at-eviction", "never"])
def test_a_context_that_slid_comes_back_however_it_is_written(kept, writing):
    contexts = kept(writing=writing)
    context, other = new(contexts), new(contexts)
    said = say(context, PROMPT).tokens
    later, sequence = reference(contexts.engine, [*PROMPT, *said, 7], 90, C)
    assert long_answer(context, 90, [7]).tokens == later
    for forget in (False, True):
        say(other, [1])
        if forget:
            contexts.memory.reclaim(contexts.memory.budget_bytes)
        config = GenerationConfig(max_tokens=2, ignore_eos=True)
        wanted = contexts.engine.generate([*sequence, 9], config).tokens
        assert say(context, [9], 2).tokens == wanted
        sequence += [9, *wanted]


def test_an_answer_that_cannot_be_kept_leaves_what_was_before(kept, monkeypatch):
    """Although it had slid: in memory and on storage all is there for the next call."""
    contexts = kept()
    context, wanted = new(contexts), answers_without_contexts(contexts.engine, TURNS[0])
    assert say(context, PROMPT).tokens == wanted[0]
    contexts.store.wait()
    before = context.record
    with monkeypatch.context() as full:

        def note(*_):
            raise BudgetExceeded("there is no room")

        full.setattr(contexts.store, "note", note)
        with pytest.raises(BudgetExceeded):
            long_answer(context, 150, [3])
    assert context.record == before
    again = say(context, TURNS[0][1])
    assert again.tokens == wanted[1]
    assert again.restoration.resident == len(before.bits)


def test_widths_follow_the_ratio_when_a_context_slid(kept):
    contexts = kept("kivi", ratio=0.6)
    context = new(contexts)
    say(context, [*range(90)])
    first = context.record.bits[0]
    long_answer(context, 120, [5])
    bits = context.record.bits
    assert bits[0] <= first
    chunk_io = contexts._chunk_io[100]
    assert sum(map(chunk_io.chunk_bytes, bits)) <= 0.6 * len(bits) * chunk_io.reference_bytes
    resident = contexts.memory.chunks(context.name)
    assert [resident[n].bits for n in sorted(resident)] == list(bits)
