"""Contexts with rows in place of tokens: they are kept with the context, and nothing is computed of their
ids."""

import functools

import numpy as np
import pytest

from jaxllm import PromptEmbeddings
from jaxllm.errors import BudgetExceeded, CheckpointError, ConfigError, ContextGone
from jaxllm.serving.contexts.context import Context, fork
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.host.direct_io import PAGE
from tests.serving.contexts.mutations import change_record, record_document
from tests.serving.contexts.talking import found, new
from tests.tiny import TINY

# Rows within the first chunk of 16, over its end, and behind the last whole chunk.
TURN, AT, NEXT = list(range(60, 97)), (3, 15, 16, 35), [7, 8, 9]


@pytest.fixture
def engine(engine_of):
    return engine_of("raw", prompt_embeddings=True)


@pytest.fixture
def kept(kept):
    return functools.partial(kept, engine={"prompt_embeddings": True})


def rows_at(*at):
    draw = np.random.default_rng(len(at))
    return PromptEmbeddings(np.array(at), draw.normal(size=(len(at), TINY.hidden_size)).astype(np.float32))


def say(context, turn, rows=None):
    return context.generate(turn, max_tokens=6, ignore_eos=True, rows=rows).result()


def expected(engine, *turns):
    """Answers to turns and their rows, without contexts."""
    tokens, rows, answers = [], None, []
    for turn, own in turns:
        rows = PromptEmbeddings.joined((0, rows), (len(tokens), own))
        tokens = [*tokens, *turn]
        config = GenerationConfig(max_tokens=6, ignore_eos=True)
        answers.append(engine.stream(tokens, config, rows=rows).result().tokens)
        tokens += answers[-1]
    return answers


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_context_goes_on_after_a_restart(kept, engine, tmp_path, encrypted):
    """Also with further rows, and where chunks with and without rows are lost."""
    options = {"encryption": tmp_path / "keys"} if encrypted else {}
    first, later = rows_at(*AT), rows_at(0, 2)
    wanted = expected(engine, (TURN, first), (NEXT, None), (NEXT, later), (NEXT, None))
    context = new(kept(**options))
    assert say(context, TURN, first).tokens == wanted[0]
    assert max(context.tokens) >= TINY.vocab_size
    contexts = kept(**options)
    context = found(contexts, context)
    answer = say(context, NEXT)
    assert answer.tokens == wanted[1]
    # Its whole chunks were read, the rows behind them fed again as rows.
    assert (answer.reused_tokens, answer.restoration.computed) == (32, ())
    assert say(context, NEXT, later).tokens == wanted[2]
    record = contexts.store.record(context.name)
    np.testing.assert_array_equal(contexts.store.rows(context.name).at[:4], AT)
    contexts.store.wait()
    assert contexts.store.verify() == []
    # The first chunk with rows that is lost, and all behind it, are computed as a prompt is.
    contexts.store.commit(contexts.store.record(context.name).lose({1}))
    contexts = kept(**options)
    answer = say(found(contexts, context), NEXT)
    assert answer.tokens == wanted[3]
    assert answer.reused_tokens == 16
    assert contexts.store.record(context.name).rows == record.rows


def test_a_call_that_gives_no_token_leaves_no_rows(kept, engine):
    contexts, rows = kept(), rows_at(*AT)
    context = new(contexts)
    answer = context.generate(TURN, max_tokens=6, ignore_eos=True, rows=rows)
    answer.close()
    assert context.tokens == ()
    assert contexts.rows_before(context.record) is None
    # What may be on storage of it is not of the next turn.
    wanted = expected(engine, (TURN, rows_at(1)))
    assert say(context, TURN, rows_at(1)).tokens == wanted[0]
    np.testing.assert_array_equal(contexts.store.rows(context.name).at, [1])


def test_a_fork_has_the_rows_of_its_tokens(kept, engine):
    contexts, rows = kept(), rows_at(*AT)
    context = new(contexts)
    say(context, TURN, rows)
    made = fork(contexts, context.record, 16)
    wanted = expected(engine, (TURN[:16] + NEXT, rows.before(16)))
    context.delete()
    contexts = kept()
    assert say(found(contexts, Context(contexts, made)), NEXT).tokens == wanted[0]
    assert contexts.store.rows(made.name).at.tolist() == [3, 15]


def test_rows_count_for_quotas_and_stay_with_their_model(kept):
    contexts = kept(app_quota_bytes=30_000)
    context = new(contexts)
    with pytest.raises(BudgetExceeded):
        say(context, list(range(100)), rows_at(*range(100)))
    contexts = kept()
    context = found(contexts, context)
    say(context, TURN, rows_at(*AT))
    with pytest.raises(ConfigError, match="rows are never made of tokens"):
        context.generate(NEXT, slide=True).result()
    contexts.store.wait()
    folder = contexts.store.root / "app-mail" / context.name
    of_rows = contexts.store.record(context.name).rows
    contexts.close()
    document = record_document(folder)
    change_record(folder, origin={**document["origin"], "model": "other"})
    with pytest.raises(ContextGone, match="rows are of another model: open it with the model"):
        found(kept(), context)
    kept().close()
    change_record(folder, origin=document["origin"])
    damaged = bytearray((folder / of_rows).read_bytes())
    damaged[-PAGE] ^= 1
    (folder / of_rows).write_bytes(damaged)
    (damage,) = kept().store.verify()
    assert (damage.name, damage.proved, damage.lost) == (context.name, True, False)
    with pytest.raises(CheckpointError, match=r"corrupt|not what was written"):
        say(found(kept(), context), NEXT)
