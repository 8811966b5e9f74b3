"""Adapters of a service whose model drafts, or is read from storage: each call has its own all the same."""

import asyncio
import dataclasses

import pytest

from jaxllm import Engine, EngineOptions, GenerationConfig
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.server.adapters import AdapterOptions, Adapters
from jaxllm.serving.server.calls import Call, Piece
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.weights.footprint import fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.models.test_lora import random_adapter
from tests.serving.server.executors import make_executor
from tests.tiny import TINY, write_tiny_bundle

DEEP = dataclasses.replace(TINY, layers=8, attention_windows=())
CONFIG = GenerationConfig(max_tokens=20, ignore_eos=True)
PROMPT = "the quick brown fox"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drafts", pytest.param("streamed", marks=pytest.mark.campaign)])
def test_each_call_has_its_adapter(tmp_path, how):
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=DEEP)
    given = {}
    for seed, name in enumerate(("formal", "terse")):
        given[name] = tmp_path / name
        lora = LoraConfig(rank=2, alpha=16)
        write_adapter(given[name], DEEP, lora, random_adapter(DEEP, lora, seed))
    options = EngineOptions(
        context_tokens=64, chunk_tokens=(16,), decode_block=4, buckets_bytes=0, adapter_rank=2
    )
    engine = Engine.open(path, options=options)
    wanted = {"": engine.generate(PROMPT, CONFIG).tokens}
    for name, folder in given.items():
        engine.set_adapter(folder)
        wanted[name] = engine.generate(PROMPT, CONFIG).tokens
    engine.close()
    drafts = None
    if how == "drafts":
        drafts = SpeculationOptions(model=path, trees=TreeShape(nodes=(4, 8), room=16), pausing=False)
    else:
        budget = fixed_bytes(DEEP, options.resolve(DEEP, quantized=False)) + path.stat().st_size // 2
        options = dataclasses.replace(options, memory_bytes=whole_budget(budget))
    service = LLMService.open(path, options=options, speculation=drafts)
    assert (service.engine.model.streamed is not None) == (how == "streamed")
    executor = make_executor(
        service, SchedulerOptions(), adapters=Adapters(service.engine.model, AdapterOptions(given=given))
    )
    executor.start()

    async def tokens(name):
        call = Call(app="mail", request_id=name, prompt=PROMPT, config=CONFIG, adapter=name)
        ticket = executor.submit(call, asyncio.get_running_loop())
        pieces = [event async for event in ticket.events() if isinstance(event, Piece)]
        return [token for each in pieces for token in each.tokens]

    async def together():
        names = ["", "formal", "terse", "", "terse", "formal"]
        return list(zip(names, await asyncio.gather(*map(tokens, names)), strict=True))

    try:
        for name, found in asyncio.run(together()):
            assert found == wanted[name], name
    finally:
        executor.stop(60)
        service.close()
    assert len({tuple(each) for each in wanted.values()}) == 3
