"""Contexts whose chunks, store, budget or callers fail: nothing older is lost, and all of it is told."""

import dataclasses
import errno
import os

import pytest

from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, ContextOverflow
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.engine.step import step
from tests.serving.contexts.talking import TURNS, answers_without_contexts, begun, found, new, say


def damaged(contexts, context, chunk, layer=1):
    """Changes a byte of a stored chunk."""
    folder = contexts.store.root / "app-mail" / context.name
    blob = contexts.store.open(context.name).read(layer, [chunk])[0].tobytes()
    for path in folder.glob("*.kv"):
        raw = bytearray(path.read_bytes())
        at = raw.find(blob)
        if at >= 0:
            raw[at + 7] ^= 255
            path.write_bytes(raw)
            return
    raise AssertionError("the chunk is in no file")


@pytest.mark.parametrize("layer", [0, 2, "gone"])
def test_a_corrupt_chunk_is_computed_from_the_text(kept, layer):
    """In whichever layer; and where the segment is gone."""
    contexts, context, wanted = begun(kept)
    if layer == "gone":
        contexts.store.wait()
        (contexts.store.root / "app-mail" / context.name / "0.kv").unlink()
    else:
        damaged(contexts, context, 1, layer)
    contexts = kept(read=True)
    context = found(contexts, context)
    answer = say(context, TURNS[0][1])
    how = ((), (0, 1)) if layer == "gone" else ((0,), (1,))
    assert (answer.restoration.read, answer.restoration.computed) == how
    assert answer.tokens == wanted[1]
    # And is whole on storage from now on.
    assert LOST not in context.record.bits
    assert contexts.store.verify() == []
    contexts = kept()
    assert say(found(contexts, context), TURNS[0][2]).tokens == wanted[2]


def test_a_segment_that_storage_refuses_is_computed_and_stays(kept, monkeypatch):
    contexts, context, wanted = begun(kept)
    contexts = kept(read=True)
    context = found(contexts, context)
    before, real = context.record, os.preadv
    path = contexts.store.root / "app-mail" / context.name / "0.kv"
    facts = path.stat()

    def refused(file, *rest):
        if os.path.samestat(facts, os.fstat(file)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, *rest)

    answer = context.generate(TURNS[0][1], max_tokens=6, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refused)
        next(answer)
        assert contexts.store.record(context.name) == before
        assert path.exists()
    answer.result()
    assert answer.restoration.computed == (0, 1)
    assert answer.tokens == wanted[1]
    assert contexts.store.verify() == []


def test_who_is_gone_is_told(kept):
    contexts = kept()
    context, other = new(contexts), new(contexts, "calendar")
    with pytest.raises(ContextGone, match=f"there is no context '{context.name}'"):
        contexts.record("calendar", context.name)
    context.delete()
    for act in (lambda: context.generate([1]), context.delete, lambda: context.tokens, context.pin):
        with pytest.raises(ContextGone, match="was deleted, or never made"):
            act()
    assert other.tokens == ()


def test_one_call_at_a_time_runs_in_a_context(kept):
    contexts = kept()
    first = new(contexts)
    running = first.generate(TURNS[0][0], max_tokens=9, ignore_eos=True)
    next(running)
    with pytest.raises(ConfigError, match="one call at a time runs in it"):
        say(first, [1])
    with pytest.raises(ConfigError, match="is answering; close its answer"):
        first.delete()
    late = first.generate([1])
    running.result()
    with pytest.raises(ConfigError, match="went on since"):
        next(late)
    assert len(say(first, [1]).tokens) == 6


def test_calls_of_different_contexts_take_turns(kept):
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    there = [new(contexts) for _ in TURNS]
    for number in range(3):
        running = [
            each.generate(turns[number], max_tokens=6, ignore_eos=True)
            for each, turns in zip(there, TURNS, strict=True)
        ]
        while any(each.stage != "ended" for each in running):
            step(*(each for each in running if each.stage != "ended"))
        assert [each.tokens for each in running] == [each[number] for each in wanted]
    # Those that are dropped or stopped in the middle keep their tokens, and unlock their contexts.
    running = [each.generate([1, 2], max_tokens=40, ignore_eos=True) for each in there]
    for each in running:
        next(each)
    del running[0], each
    contexts.stop()
    with pytest.raises(ConfigError, match="ended by its service"):
        running[0].result()
    for each, turns in zip(there, TURNS, strict=True):
        assert len(each.tokens) > sum(map(len, turns)) + 3 * 6 + 2
        assert len(say(each, [1]).tokens) == 6
    assert contexts.memory.kept_bytes == 0


def test_bad_input_is_told(kept, engine_of):
    contexts = kept(contexts_per_app=1)
    context = new(contexts)
    with pytest.raises(BudgetExceeded, match="owns 1 contexts of at most 1"):
        new(contexts)
    with pytest.raises(ConfigError, match="level 70 is not served"):
        new(contexts, "calendar", level=70)
    for prompt in ([], "", "  "):
        with pytest.raises(ConfigError, match="the prompt is empty"):
            context.generate(prompt)
    with pytest.raises(ConfigError, match="an instruction comes with"):
        context.generate([1], instruction="Be short.")
    with pytest.raises(ContextOverflow):
        context.generate([1] * 129)
    with pytest.raises(ConfigError, match="ratio must be"):
        dataclasses.replace(contexts.options, ratio=0)
    with pytest.raises(ConfigError, match="writing must be one of background, ahead"):
        dataclasses.replace(contexts.options, writing="sometimes")
    with pytest.raises(ConfigError, match="no eviction policy"):
        dataclasses.replace(contexts.options, policy="random")
    plain = type("Plain", (), {"options": dataclasses.replace(contexts.engine.options, kv_codec="")})()
    with pytest.raises(ConfigError, match="keeps no contexts"):
        Contexts(plain, contexts.options)
