"""High planes that draft for their own weights: answers are the weights' own, in memory and streamed."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.bundle.levels import elastic_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.cli.answer_facts import draft_facts
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kernels import native
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.direct_io import Storage
from jaxllm.serving.opening import engine as opening
from jaxllm.serving.speculation import model_drafter
from jaxllm.serving.speculation.confidence import confidence_temperature
from jaxllm.serving.weights.embedding import EmbeddingRows
from jaxllm.serving.weights.footprint import drafter_bytes, fixed_bytes
from jaxllm.serving.weights.prefetch_plan import whole_budget
from tests.models.test_lora import random_adapter
from tests.serving.speculation.test_speculative import CFG, DRAWN, GREEDY, OPTIONS, PROMPT, TREES, sharp
from tests.tiny import tiny_params, write_tiny_bundle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.kernels().native, reason="planes are read by native kernels"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    parts = elastic_parts(Ladder(levels=(25, 100)))
    folder = tmp_path_factory.mktemp("nested")
    return write_tiny_bundle(folder / "nested.jaxllm", "int8-nested", cfg=CFG, params=sharp(CFG), parts=parts)


@pytest.fixture(scope="module")
def plain(path):
    return Engine.open(path, options=OPTIONS, warm_up=False)


def answer(engine, config, prompt=PROMPT):
    runner = engine.runner
    runner.fill(runner.request_buckets(len(engine.tokenizer.encode(prompt)), config.max_tokens))
    return engine.generate(prompt, config).tokens


def drafts(level=0):
    return SpeculationOptions(
        drafter="nested", level=level, trees=TREES, pausing=False, fallback="fixed", alpha=1e-6, lookup=False
    )


def opened(path, options, level=0):
    engine = Engine.open(path, options=options, speculation=drafts(level), warm_up=False)
    engine.warm_up(prompt_tokens=80, max_tokens=48)
    engine.runner.fill(engine.runner.request_buckets(80, engine.speculation.cache_tokens(48)))
    return engine


def memory_for(plain, share):
    others = fixed_bytes(CFG, dataclasses.replace(plain.options, trees=TREES))
    others += drafter_bytes(drafts(), OPTIONS.context_tokens, CFG)
    return whole_budget(others + int(share * plain.model.bundle.weight_bytes))


@pytest.mark.parametrize(
    ("level", "share"), [(0, 0), (25, 0), (0, 0.75)], ids=["in memory", "a level", "streamed"]
)
def test_the_answer_is_that_of_both_planes(path, plain, level, share, compiles, monkeypatch):
    memory = memory_for(plain, share) if share else 0
    # So slow that there is something to wait for.
    options = dataclasses.replace(OPTIONS, memory_bytes=memory, storage=Storage(latency_ms=4))
    engine = opened(path, options, level)
    streamed = engine.model.streamed
    assert (streamed is not None) == bool(share)
    if streamed is not None:
        # The drafter goes on from the target's keys and values, and reads no prompt.
        monkeypatch.delattr(model_drafter, "prefill_prompt")
        # The embedding stays in memory, so that no row of it is read.
        monkeypatch.delattr(EmbeddingRows, "_read")
        prunes = counted(engine.speculation.drafter, "_prune", monkeypatch)
    with compiles() as count:
        found = [engine.generate(PROMPT, config).tokens for config in (GREEDY, DRAWN)]
    assert count() == 0
    assert found == [answer(plain, config) for config in (GREEDY, DRAWN)]
    counts = engine.speculation.counts
    assert counts.tokens + counts.plain_tokens == 2 * (GREEDY.max_tokens - 1)
    if not level:
        # Random weights are hard to foretell at 4 bits.
        assert counts.acceptance_length > 1.05
    if streamed is not None:
        # High planes were read once, low planes in each pass.
        plan, whole = streamed.plan, plain.model.bundle.weight_bytes
        passes = counts.verifications + counts.plain_tokens + 2
        assert plan.slots == 2
        assert streamed.counts.read_bytes <= (passes + 1) * whole // 2
        assert counts.hidden_steps
        # Where no room is left, it drafts on without the least likely nodes.
        assert prunes
    engine.close()


def counted(drafter, name, monkeypatch):
    """A list that grows by one with each call of a method."""
    calls, method = [], getattr(drafter, name)
    monkeypatch.setattr(drafter, name, lambda: (calls.append(name), method()))
    return calls


def test_a_context_keeps_the_attention_of_the_target_alone(path, plain):
    """Drafts attend, and are not counted: chunks are stored as if nothing had been drafted."""
    options = dataclasses.replace(OPTIONS, kv_codec="channel")
    whole = Engine.open(path, options=options, warm_up=False)
    drafted = opened(path, options)
    masses = []
    for engine in (whole, drafted):
        run = engine.stream(PROMPT, GREEDY)
        engine.runner.fill(engine.runner.request_buckets(80, 48))
        run.result()
        assert run.session.cache is not None
        masses.append(run.session.cache.mass[0, : len(run.session.tokens) - 1])
    assert drafted.speculation.counts.accepted
    assert abs(masses[0] - masses[1]).max() < 1e-4 * abs(masses[0]).max()


def test_an_adapter_drafts_as_well(path, plain, tmp_path):
    lora = LoraConfig(rank=4, alpha=16)
    write_adapter(tmp_path / "adapter", CFG, lora, random_adapter(CFG, lora, 0))
    options = dataclasses.replace(OPTIONS, adapter_rank=4)
    adapted, drafted = Engine.open(path, options=options, warm_up=False), opened(path, options)
    before = drafted.generate(PROMPT, GREEDY).tokens
    for engine in (adapted, drafted):
        engine.set_adapter(tmp_path / "adapter")
    after = drafted.generate(PROMPT, GREEDY).tokens
    assert after == answer(adapted, GREEDY) != before
    drafted.set_adapter(None)
    assert drafted.generate(PROMPT, GREEDY).tokens == before


def test_weights_that_are_not_nested(tmp_path):
    path = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    with pytest.raises(ConfigError, match="prepare the model with --weights int8-nested"):
        Engine.open(path, options=OPTIONS, speculation=drafts(), warm_up=False)


def test_a_budget_without_room_for_high_planes(path, plain):
    options = dataclasses.replace(OPTIONS, memory_bytes=memory_for(plain, 0.4))
    with pytest.raises(BudgetExceeded, match="at least"):
        Engine.open(path, options=options, speculation=drafts(), warm_up=False)


def test_by_itself_a_model_drafts_where_it_can_and_may_pay(path, plain, tmp_path, monkeypatch):
    own = SpeculationOptions.by_itself()

    def drafter(path, share=0.0):
        memory = memory_for(plain, share) if share else 0
        options = dataclasses.replace(OPTIONS, memory_bytes=memory)
        engine = Engine.open(path, options=options, speculation=own, warm_up=False)
        found = None if engine.speculation is None else engine.speculation.options.drafter
        engine.close()
        return found

    # So small that it is in the processor's caches.
    assert drafter(path) is None
    # Streamed it drafts, unless the memory has no room for high planes.
    monkeypatch.setattr("tests.serving.speculation.test_nested_drafter.TREES", own.trees)
    assert (drafter(path, 0.8), drafter(path, 0.3)) == ("nested", None)
    monkeypatch.setattr(opening, "_LEAST_DRAFTING_BYTES", 0)
    assert drafter(path) == "nested"
    other = write_tiny_bundle(tmp_path / "plain.jaxllm", "int8", cfg=CFG, params=tiny_params(CFG))
    assert drafter(other) is None
    engine = Engine.open(path, options=OPTIONS, speculation=own, level=25, warm_up=False)
    assert engine.speculation is None


def test_whether_drafts_pay_is_said(path):
    options = dataclasses.replace(drafts(), pausing=True)
    engine = Engine.open(path, options=OPTIONS, speculation=options, warm_up=False)
    assert draft_facts(engine.speculation)["drafts"]["pays"] is None
    engine.warm_up(prompt_tokens=80, max_tokens=48)
    engine.runner.fill(engine.runner.request_buckets(80, engine.speculation.cache_tokens(48)))
    engine.generate(PROMPT, GREEDY)
    facts = draft_facts(engine.speculation)["drafts"]
    assert facts["pays"] == (facts["drafted_token_ms"] <= facts["plain_token_ms"])
    # Some tokens are decoded plainly, to know their time.
    assert facts["plain_tokens"] >= 4


def test_confidences_follow_the_sampler():
    assert confidence_temperature(0.0, 1.0) == confidence_temperature(0.7, 1.0) == 1.0
    assert confidence_temperature(0.0, 0.25) == 0.25
    assert confidence_temperature(0.7, 0.25) == 0.7
