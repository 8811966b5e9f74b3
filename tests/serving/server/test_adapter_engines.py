"""Services whose model drafts, or is read from storage: each call has its own adapter all the same."""

import dataclasses

import pytest

from jaxllm import Engine, EngineOptions
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.server.adapters import Adapters
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.weights.memory_plan import fixed_bytes, whole_budget
from tests.models.test_lora import random_adapter
from tests.serving.server.executors import make_executor
from tests.serving.server.test_executor import call, together, written
from tests.tiny import TINY, write_tiny_bundle

DEEP = dataclasses.replace(TINY, layers=8, attention_windows=())
ASKED = call("the quick brown fox", tokens=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cfg"), [("drafts", TINY), pytest.param("streamed", DEEP, marks=pytest.mark.campaign)]
)
def test_each_call_has_its_adapter_and_drafts_are_told(tmp_path, how, cfg):
    path, given, lora = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg), {}, LoraConfig(rank=2, alpha=16)
    for seed, name in enumerate(("formal", "terse")):
        given[name] = tmp_path / name
        write_adapter(given[name], cfg, lora, random_adapter(cfg, lora, seed))
    options = EngineOptions(
        context_tokens=64, cache_tokens=(64,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0,
        adapter_rank=2,
    )  # fmt: skip
    engine, wanted = Engine.open(path, options=options), {}
    for name, folder in {"": None, **given}.items():
        engine.set_adapter(folder)
        wanted[name] = engine.generate(ASKED.prompt, ASKED.config).tokens
    engine.close()
    assert len({tuple(each) for each in wanted.values()}) == 3
    drafts, dispatches = None, []
    if how == "drafts":
        shape = TreeShape(nodes=(4, 8), room=16)
        drafts = SpeculationOptions(model=path, trees=shape, pausing=False, fallback="fixed", alpha=1e-6)
    else:
        budget = fixed_bytes(cfg, options.resolve(cfg, quantized=False)) + path.stat().st_size // 2
        options = dataclasses.replace(options, memory_bytes=whole_budget(budget))
    service = LLMService.open(path, options=options, speculation=drafts)
    assert (service.engine.model.streamed is not None) == (how == "streamed")
    adapters = Adapters(service.engine.model, ServerOptions(adapter=given))
    executor = make_executor(service, adapters=adapters, on_dispatch=dispatches.append)
    executor.start()
    try:
        if how == "drafts":
            # Opening rehearsed it.
            counts = service.engine.speculation.counts
            before = dataclasses.replace(counts)
            (events,) = together(executor, ASKED)
            accepted = counts.accepted - before.accepted
            verified = [each for each in dispatches if each.kind == "verify"]
            assert 0 < accepted < 20
            assert len(verified) == counts.verifications - before.verifications
            # Of each verification all tokens but the last were drafted.
            assert sum(each.tokens for each in verified) == accepted + len(verified)
            assert events[-1].drafted == accepted / 20
        names = ["", "formal", "terse", "", "terse", "formal"]
        calls = [dataclasses.replace(ASKED, adapter=name) for name in names]
        for name, events in zip(names, together(executor, *calls), strict=True):
            assert written(events)[1] == wanted[name], name
    finally:
        executor.stop(60)
        service.close()
