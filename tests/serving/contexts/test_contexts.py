"""Contexts of apps: their calls go on as one conversation, whatever ran in between and whatever was lost."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone, ContextOverflow
from jaxllm.kv.codecs import RAW
from jaxllm.kv.recompute import LOST, Delay
from jaxllm.kv.tolerance import RATIOS
from jaxllm.tokenizer import Tokenizer
from serving.contexts.context import Context, turn_ids
from serving.contexts.delays import Delays
from serving.contexts.manager import Contexts
from serving.contexts.options import ContextOptions
from serving.generation import GenerationConfig, Session
from tests.kernels.switching import needs_native
from tests.tiny import END_ID, tiny_tokenizer

ROOT = Path(__file__).parents[3]
C = 16
DRAW = np.random.default_rng(5)
# Nothing is computed that can be read.
READ = Delays(reading=Delay(fixed_ms=0.0, per_unit_ms=1e-9), computing=Delay(fixed_ms=9.0, per_unit_ms=9.0))
TURNS = [[DRAW.integers(0, 250, size).tolist() for size in (37, 5, 21)] for _ in range(3)]


@pytest.fixture
def kept(engine_of, tmp_path):
    """Contexts in a folder of the test's, by codec; opened again by calling again."""
    opened = []

    def again(codec="raw", weights="f32", levels=(), **options):
        while opened:
            opened.pop().close()
        folder = tmp_path / "store"
        contexts = Contexts(engine_of(codec, weights, levels), ContextOptions(folder=folder, **options))
        opened.append(contexts)
        return contexts

    yield again
    while opened:
        opened.pop().close()


def new(contexts, app="mail", **options):
    return Context(contexts, contexts.create(app, **options))


def found(contexts, context):
    return Context(contexts, contexts.record(context.app, context.name))


def say(context, turn, count=6):
    """What is answered to token ids."""
    return context.generate(turn, max_tokens=count, ignore_eos=True).result()


def answers_without_contexts(engine, turns, count=6):
    """The conversation with a cache that stays."""
    session, tokens, answers = Session(), [], []
    for turn in turns:
        tokens += turn
        config = GenerationConfig(max_tokens=count, ignore_eos=True)
        answers.append(engine.stream(tokens, config, session=session).result().tokens)
        tokens += answers[-1]
    return answers


# Going on


def test_calls_are_one_conversation_whatever_ran_between(kept, compiles):
    """Token for token, with chunks as they are: three contexts by turns, and after each a fresh memory."""
    contexts = kept()
    wanted = [answers_without_contexts(contexts.engine, turns) for turns in TURNS]
    mine = [new(contexts) for _ in TURNS]
    with compiles() as count:
        for turn in range(3):
            for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
                answer = say(context, turns[turn])
                assert answer.generation.tokens == answers[turn]
                # What is cached is what was saved.
                saved = (37 + 6 - 1) // C if turn == 1 else (37 + 6 + 5 + 6 - 1) // C
                if turn:
                    assert answer.generation.reused_tokens == saved * C
                    assert answer.restoration.resident == saved
        assert count() == 0
    contexts = kept()
    for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
        said = zip(turns, answers, strict=True)
        assert found(contexts, context).tokens == tuple(t for pair in said for part in pair for t in part)


def test_the_context_that_ran_last_is_still_there(kept):
    contexts = kept()
    context, wanted = new(contexts), answers_without_contexts(contexts.engine, TURNS[0])
    for turn, answer in zip(TURNS[0], wanted, strict=True):
        said = say(context, turn)
        assert said.generation.tokens == answer
    # All but the last token, whole chunks or not.
    assert said.generation.reused_tokens == 37 + 6 + 5 + 6 - 1


def test_a_fresh_process_goes_on_token_for_token(kept, tmp_path):
    contexts = kept()
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context = new(contexts)
    assert say(context, TURNS[0][0]).generation.tokens == wanted[0]
    contexts.close()
    code = f"""
import json
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.contexts.options import ContextOptions
from serving.engine import Engine
from serving.options import EngineOptions
engine = Engine.open({str(contexts.engine.bundle.path)!r}, options={contexts.engine.options!r})
contexts = Contexts(engine, ContextOptions(folder={str(tmp_path / "store")!r}))
context = Context(contexts, contexts.record("mail", {context.name!r}))
answer = context.generate({TURNS[0][1]!r}, max_tokens=6, ignore_eos=True).result()
how = answer.restoration
print(json.dumps([answer.generation.tokens, answer.generation.reused_tokens, len(how.read + how.computed)]))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [wanted[1], 2 * C, 2]


def test_an_answer_that_is_closed_is_part_of_the_context(kept):
    contexts = kept()
    context = new(contexts)
    answer = context.generate(TURNS[0][0], max_tokens=40, ignore_eos=True)
    next(answer)
    answer.close()
    answer.close()
    assert context.tokens == (*TURNS[0][0], *answer.generation.tokens)
    assert 0 < len(answer.generation.tokens) < 40
    # Before the first piece nothing was said, and nothing stays.
    context.generate([1], max_tokens=4).close()
    assert context.tokens == (*TURNS[0][0], *answer.generation.tokens)
    assert say(context, [1]).generation.reused_tokens == 37 + len(answer.generation.tokens) - 1


def test_an_answer_that_is_dropped_holds_nobody_up(kept):
    contexts = kept()
    context, other = new(contexts), new(contexts)
    answer = context.generate(TURNS[0][0], max_tokens=40, ignore_eos=True)
    next(answer)
    del answer
    gc.collect()
    assert len(say(other, [1]).generation.tokens) == 6
    assert len(context.tokens) > 37


@pytest.mark.parametrize("weights", ["f32", pytest.param("int8", marks=needs_native)])
def test_levels_keep_contexts_of_their_own(kept, weights):
    """With graphs of each level's own, and with one set for all."""
    contexts = kept("raw", weights, (50,))
    half, whole = new(contexts, level=50), new(contexts)
    assert (half.level, whole.level) == (50, 100)
    first = [say(each, TURNS[0][0]) for each in (half, whole)]
    again = [say(each, TURNS[0][1]) for each in (half, whole)]
    assert [each.restoration.resident for each in again] == [2, 2]
    for level, context, answers in ((50, half, (first[0], again[0])), (100, whole, (first[1], again[1]))):
        wanted = answers_without_contexts(contexts.engine.at(level), TURNS[0][:2])
        assert [each.generation.tokens for each in answers] == wanted, context


# Memory


def test_chunks_leave_memory_and_come_back(kept):
    """Room for about one context of three; what is pinned stays."""
    contexts = kept()
    one = 4 * contexts._graphs[100].chunk_bytes(RAW)
    contexts = kept(budget_bytes=2 * one)
    wanted = [answers_without_contexts(contexts.engine, turns[:2]) for turns in TURNS]
    mine = [new(contexts, pinned=not place) for place in range(3)]
    for turn in range(2):
        for context, turns, answers in zip(mine, TURNS, wanted, strict=True):
            answer = say(context, turns[turn])
            assert answer.generation.tokens == answers[turn]
            assert contexts.memory.resident_bytes <= 2 * one
            if turn:
                how = answer.restoration
                assert how.resident + len(how.read) + len(how.computed) == 2
                assert (context is mine[0]) <= (how.resident == 2)
    assert contexts.memory.evicted > 0
    mine[0].pin(False)
    assert not mine[0].record.pinned


def test_a_budget_below_one_context_is_told(kept):
    contexts = kept()
    chunk = contexts._graphs[100].chunk_bytes(RAW)
    contexts = kept(budget_bytes=3 * chunk)
    context = new(contexts)
    with pytest.raises(BudgetExceeded, match="may come to need"):
        say(context, TURNS[0][0], 40)
    # Nothing is locked, nothing was said.
    assert context.tokens == ()
    assert len(say(context, TURNS[0][0], 8).generation.tokens) == 8


# Compression


def test_widths_follow_the_ratio_and_never_rise(kept):
    contexts = kept("kivi", ratio=0.6)
    context, before = new(contexts), ()
    for turn in ([*range(70)], [5] * 9, [7] * 9, [9] * 9):
        say(context, turn, 3)
        record = context.record
        assert np.mean([RATIOS[bits] for bits in record.bits]) <= 0.6 + 1e-9
        assert all(new <= old for new, old in zip(record.bits, before, strict=False))
        # How many chunks the newest one's width would leave no room for is not asked of so few.
        assert record.bits[-1] == max(record.bits[len(before) :], default=record.bits[-1])
        density = np.array(record.mass) / record.seen
        assert np.all((density > 0) & (density < 1))
        # What is in memory is what is stored.
        resident = contexts.memory.chunks(context.name)
        assert [resident[n].bits for n in sorted(resident)] == list(record.bits)
        before = record.bits
    assert len(set(before)) > 1


def test_mass_adds_up_over_calls_and_restarts(kept):
    """Each query hands out one of each head, of which the tail behind the last chunk gets its part."""
    contexts = kept("kivi")
    context, other = new(contexts), new(contexts)
    say(context, TURNS[0][0], 3)
    say(other, TURNS[1][0], 3)
    say(context, TURNS[0][1], 3)
    record, cfg = context.record, contexts.engine.cfg
    fed = (37 + 2) + (37 + 3 + 5 + 2 - 32)
    assert 0.5 * fed * cfg.heads * cfg.layers < sum(record.mass) < fed * cfg.heads * cfg.layers
    assert record.seen[0] > record.seen[1] > 0


def test_compressed_contexts_come_back_alike(kept):
    """From memory, and from storage over many files that were put together."""
    contexts = kept("channel", ratio=0.75)
    one, same, other = (new(contexts) for _ in range(3))
    for turn in range(10):
        for context in (one, same):
            say(context, [turn + 1] * 5, 3)
        assert len(one.record.segments) <= 8
    assert one.record.bits == same.record.bits
    assert len(set(one.record.bits)) > 1
    say(other, [1], 1)
    first = say(one, [3], 8)
    assert first.restoration.resident == (10 * 8 - 1) // C
    contexts = kept("channel", ratio=0.75)
    contexts._delays[100] = READ
    again = say(found(contexts, same), [3], 8)
    assert len(again.restoration.read) == (10 * 8 - 1) // C
    assert again.generation.tokens == first.generation.tokens


# Faults


def damaged(contexts, context, chunk, layer=1):
    """Changes a byte of a stored chunk."""
    folder = contexts.store.root / "app-mail" / context.name
    with contexts.store.open(context.name) as opened:
        blob = opened.read(layer, [chunk])[0].tobytes()
    for path in folder.glob("*.kv"):
        raw = bytearray(path.read_bytes())
        at = raw.find(blob)
        if at >= 0:
            raw[at + 7] ^= 255
            path.write_bytes(raw)
            return
    raise AssertionError("the chunk is in no file")


@pytest.mark.parametrize("layer", [0, 2])
def test_a_corrupt_chunk_is_computed_from_the_text(kept, layer):
    contexts = kept()
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context = new(contexts)
    say(context, TURNS[0][0])
    damaged(contexts, context, 1, layer)
    contexts = kept()
    contexts._delays[100] = READ
    context = found(contexts, context)
    answer = say(context, TURNS[0][1])
    assert answer.restoration.read == (0,)
    assert answer.restoration.computed == (1,)
    assert answer.generation.tokens == wanted[1]
    # And is whole on storage from now on.
    assert LOST not in context.record.bits
    assert contexts.store.verify() == []
    contexts = kept()
    assert say(found(contexts, context), TURNS[0][2]).generation.tokens == wanted[2]


def test_a_segment_that_is_gone_is_computed_from_the_text(kept):
    contexts = kept()
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context = new(contexts)
    say(context, TURNS[0][0])
    for path in (contexts.store.root / "app-mail" / context.name).glob("*.kv"):
        path.unlink()
    contexts = kept()
    answer = say(found(contexts, context), TURNS[0][1])
    assert answer.restoration.computed == (0, 1)
    assert answer.generation.tokens == wanted[1]


def test_a_full_quota_leaves_the_context_as_it_was(kept):
    contexts = kept(quota_bytes=1 << 16)
    context = new(contexts)
    say(context, [1, 2, 3], 2)
    before = context.record
    with pytest.raises(BudgetExceeded, match="delete contexts"):
        say(context, TURNS[0][0] * 2)
    assert context.record == before
    assert contexts.store.verify() == []
    context.delete()
    assert len(say(new(contexts), [1, 2, 3], 2).text) >= 0


def test_who_is_gone_is_told(kept):
    contexts = kept()
    context, other = new(contexts), new(contexts, "calendar")
    with pytest.raises(ContextGone, match="has no context"):
        contexts.record("calendar", context.name)
    with pytest.raises(ContextGone, match="there is no context 'x'"):
        contexts.record("mail", "x")
    context.delete()
    for act in (lambda: context.generate([1]), context.delete, lambda: context.tokens, context.pin):
        with pytest.raises(ContextGone, match="was deleted, or never made"):
            act()
    assert other.tokens == ()


def test_contexts_of_other_settings_are_refused(kept):
    contexts = kept("raw", "f32", (50,))
    half = new(contexts, level=50)
    with pytest.raises(ContextGone, match="level 50, which is not served"):
        found(kept(), half)
    whole = new(kept())
    with pytest.raises(ContextGone, match=r"codec raw \(here kivi\)"):
        found(kept("kivi"), whole)
    assert found(kept(), whole).tokens == ()


def test_one_process_has_the_store(kept, engine_of):
    contexts = kept()
    with pytest.raises(ConfigError, match="in use by another process"):
        Contexts(contexts.engine, contexts.options)


def test_one_call_runs_at_a_time(kept):
    contexts = kept()
    first, second = new(contexts), new(contexts)
    running = first.generate(TURNS[0][0], max_tokens=9, ignore_eos=True)
    next(running)
    with pytest.raises(ConfigError, match="one call runs at a time"):
        say(second, [1])
    with pytest.raises(ConfigError, match="is answering; close its answer"):
        first.delete()
    late = first.generate([1])
    running.result()
    with pytest.raises(ConfigError, match="went on since"):
        next(late)
    assert len(say(second, [1]).generation.tokens) == 6


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
        dataclasses.replace(contexts.options, ratio=0.1)
    with pytest.raises(ConfigError, match="no eviction policy"):
        dataclasses.replace(contexts.options, policy="random")
    plain = type("Plain", (), {"options": dataclasses.replace(contexts.engine.options, kv_codec="")})()
    with pytest.raises(ConfigError, match="keeps no contexts"):
        Contexts(plain, contexts.options)


# Text


def test_turns_stand_between_what_the_template_writes():
    chat = Tokenizer(tiny_tokenizer())
    first = turn_ids(chat, [], "hi", "Be kind.")
    assert chat.decode(first, skip_special_tokens=False).endswith("<|user|>hi<|assistant|>")
    later = turn_ids(chat, [*first, 65], "and?")
    assert chat.decode(later, skip_special_tokens=False) == "<|user|>and?<|assistant|>"
    plain = Tokenizer(tiny_tokenizer(chat=False))
    assert plain.decode(turn_ids(plain, [], "hi"), skip_special_tokens=False) == "<|begin|>hi"
    assert plain.decode(turn_ids(plain, [1], " there"), skip_special_tokens=False) == " there"
    with pytest.raises(ConfigError, match="an instruction comes with the first"):
        turn_ids(plain, [1], "hi", "Be kind.")


def test_an_end_token_is_not_said_twice():
    files = tiny_tokenizer()
    closing = files.chat_template.replace("{{ message.content }}", "{{ message.content }}<|end|>")
    chat = Tokenizer(dataclasses.replace(files, chat_template=closing))
    whole = turn_ids(chat, [65], "and?")
    assert whole[0] == END_ID
    assert turn_ids(chat, [65, END_ID], "and?") == whole[1:]
