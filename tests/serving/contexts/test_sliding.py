"""Answers that outgrow the window: they go on, and what is kept of them is what a prefill of it gives."""

import numpy as np
import pytest

from jaxllm.contexts.tolerance import sightings
from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import GenerationConfig, Sliding, slid
from tests.serving.contexts.talking import TURNS, C, found, new, say

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
