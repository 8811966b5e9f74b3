"""Adapters on a running engine: put on, changed and taken off, and nothing is compiled."""

import dataclasses

import pytest

from jaxllm import Engine, GenerationConfig
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import ConfigError, ContextGone
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.engine.request import Session
from tests.models.test_lora import random_adapter
from tests.serving.conftest import OPTIONS
from tests.tiny import TINY, write_tiny_bundle

ADAPTABLE = dataclasses.replace(OPTIONS, adapter_rank=4)
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPT = "hello there"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (rank, targets) in enumerate([(4, LoraConfig.targets), (2, ("attn.q", "ffn.down"))]):
        lora = LoraConfig(rank=rank, alpha=16, targets=targets)
        write_adapter(folder / str(seed), TINY, lora, random_adapter(TINY, lora, seed))
    return folder / "0", folder / "1"


@pytest.fixture(scope="module", params=["f32", "int8"])
def engine(request, tmp_path_factory):
    bundle = write_tiny_bundle(tmp_path_factory.mktemp("adapted") / "tiny.jaxllm", request.param)
    return Engine.open(bundle, options=ADAPTABLE)


def answer(engine, session=None):
    return engine.stream(PROMPT, CONFIG, session=session or Session()).result().tokens


def test_adapters_are_swapped_without_compiling(engine, adapters, compiles):
    plain = answer(engine)
    with compiles() as count:
        engine.set_adapter(adapters[0])
        first = answer(engine)
        engine.set_adapter(adapters[1])
        second = answer(engine)
        engine.set_adapter(None)
        assert answer(engine) == plain
        assert count() == 0
    assert len({tuple(plain), tuple(first), tuple(second)}) == 3


@pytest.mark.slow
def test_an_engine_opens_with_an_adapter_of_its_own_size_or_none(engine, adapters):
    path = engine.model.bundle.path
    assert answer(engine) == answer(Engine.open(path, options=OPTIONS))
    opened = Engine.open(path, options=OPTIONS, adapter=adapters[1])
    assert (opened.options.adapter_rank, opened.options.adapter_targets) == (2, ("attn.q", "ffn.down"))
    engine.set_adapter(adapters[1])
    assert answer(opened) == answer(engine)
    engine.set_adapter(None)
    with pytest.raises(ConfigError, match="adapter_targets"):
        opened.set_adapter(adapters[0])


def test_a_session_is_fed_anew_under_another_adapter(engine, adapters):
    session = Session()
    answer(engine, session)
    again = engine.stream(PROMPT, CONFIG, session=session).result()
    assert again.reused_tokens > 0
    engine.set_adapter(adapters[0])
    adapted = engine.stream(PROMPT, CONFIG, session=session).result()
    assert adapted.reused_tokens == 0
    assert adapted.tokens == answer(engine)
    # In the middle of an answer there is nothing right to go on with.
    running = engine.stream(PROMPT, dataclasses.replace(CONFIG, max_tokens=60), session=Session())
    next(iter(running))
    engine.set_adapter(None)
    with pytest.raises(ContextGone, match="adapter was changed"):
        running.result()


def test_an_engine_without_room_for_adapters_says_so(tiny_bundle, adapters):
    plain = Engine.open(tiny_bundle, options=OPTIONS, warm_up=False)
    with pytest.raises(ConfigError, match="adapter_rank"):
        plain.set_adapter(adapters[0])
    with pytest.raises(ConfigError, match="need an adapter_rank"):
        dataclasses.replace(OPTIONS, adapter_targets=("attn.q",))
    with pytest.raises(ConfigError, match="rank of an adapter"):
        dataclasses.replace(OPTIONS, adapter_rank=-1)
