"""Rows in place of a prompt's tokens: what they answer, what a session knows of them, what is refused."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine, GenerationConfig, PromptRows, Sampling
from jaxllm.errors import ConfigError
from jaxllm.serving.engine.request import Session, Sliding
from tests.serving.conftest import OPTIONS
from tests.tiny import tiny_params

PROMPT = np.random.default_rng(0).integers(0, 256, 45).tolist()
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
# In the first, in both chunks of 16 and 32 tokens, and alone in the last.
AT = (0, 3, 15, 16, 17, 40)


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    with_rows = Engine.open(tiny_bundle, options=dataclasses.replace(OPTIONS, prompt_rows=True))
    yield with_rows
    with_rows.close()


def own_rows(at=AT, factor=1.0):
    """The embeddings of the prompt's own tokens."""
    table = np.asarray(tiny_params()["embed.tokens"], np.float32)
    return PromptRows(np.array(at), np.float32(factor) * table[[PROMPT[each] for each in at]])


def answer(engine, rows, session=None, prompt=None, config=CONFIG):
    other = [1 if at in AT else each for at, each in enumerate(PROMPT)] if prompt is None else prompt
    return engine.stream(other, config, rows=rows, session=session).result()


def test_rows_of_tokens_are_those_tokens(engine):
    plain = engine.stream(PROMPT, CONFIG).result()
    assert answer(engine, own_rows()).tokens == plain.tokens
    assert answer(engine, own_rows(factor=-3.0)).tokens != plain.tokens
    # Tokens that rows stand for are not of the answer's text: no penalty is for them.
    drawn = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.7, seed=3, repetition_penalty=1.2))
    assert len(answer(engine, own_rows(), config=drawn).tokens) == 12


def test_a_session_knows_rows_by_their_content(engine):
    session = Session()
    first = answer(engine, own_rows(), session)
    longer = [1 if at in AT else each for at, each in enumerate([*PROMPT, *first.tokens, 7, 8])]
    again = answer(engine, own_rows(), session, longer)
    assert again.reused_tokens == len(PROMPT) + len(first.tokens) - 1
    assert again.tokens == answer(engine, own_rows(), prompt=longer).tokens
    # Another row at the fourth place: three tokens are the same.
    other = own_rows()
    other.rows[1] *= 2
    assert answer(engine, other, session).reused_tokens == 3
    # Its rows are no tokens.
    assert engine.stream(PROMPT, CONFIG, session=session).result().reused_tokens == 0


@pytest.mark.parametrize(
    ("at", "rows", "match"),
    [
        ((0,), np.zeros((1, 63)), "63 numbers"),
        ((45,), np.zeros((1, 64)), "stands at 45"),
        ((1, 1), np.zeros((2, 64)), "ascending"),
        ((-1,), np.zeros((1, 64)), "ascending"),
        ((0.5,), np.zeros((1, 64)), "whole numbers"),
        ((0,), np.full((1, 64), np.nan), "not|NaN"),
        ((0, 1), np.zeros((1, 64)), r"\[1, 64\] at \[2\]"),
        ((), np.zeros((0, 64)), r"\[0, 64\]"),
    ],
)
def test_rows_that_do_not_fit(engine, at, rows, match):
    with pytest.raises(ConfigError, match=match) as caught:
        answer(engine, PromptRows(np.array(at), rows))
    assert "\n" not in str(caught.value)


def test_requests_that_do_not_take_rows(engine, tiny_bundle):
    with pytest.raises(ConfigError, match="encode the prompt first"):
        engine.stream("hello", rows=own_rows((0,)))
    with pytest.raises(ConfigError, match="without `sliding`"):
        engine.stream(PROMPT, rows=own_rows(), sliding=Sliding(sink_tokens=2))
    plain = Engine.open(tiny_bundle, options=OPTIONS, warm_up=False)
    with pytest.raises(ConfigError, match=r"EngineOptions\(prompt_rows=True\)"):
        answer(plain, own_rows())
