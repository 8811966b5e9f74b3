"""Opens engines, services, contexts and programs as their users do, and writes down what they answer.

All that goldens know of the API of `serving` and `export` is in this file.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm import Engine
from jaxllm.bundle.tiny_lm import read_tiny_lm
from jaxllm.export.programs.model import open_program
from jaxllm.sampling import Sampling
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.server.service import LLMService
from jaxllm.serving.weights.memory_plan import drafter_bytes, fixed_bytes, whole_budget

Answer = dict[str, Any]
OPTIONS = EngineOptions(
    context_tokens=128, cache_tokens=(128,), chunk_tokens=(16,), decode_block=4, buckets_bytes=0
)
# One size of trees, all that is drafted is verified, and nothing waits: what is counted is no matter of time.
TREES = TreeShape(nodes=(8,), room=8, threshold=0.02)
_ALWAYS = SpeculationOptions(
    drafter="ngram", trees=TREES, alpha=1e-6, fallback="fixed", pipelined=False, pausing=False, lookup=False
)
GREEDY = GenerationConfig(max_tokens=24, ignore_eos=True)
DRAWN = dataclasses.replace(
    GREEDY, sampling=Sampling(temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.1)
)


def open_engine(
    path: Path | str,
    *,
    speculation: SpeculationOptions | None = None,
    adapter: Path | None = None,
    prefill: str = "",
    predictor: str = "",
    **options: Any,
) -> Engine:
    """An engine with `OPTIONS`, but for those that are given; it compiles what its requests need."""
    if prefill:
        processors = 2 if prefill == "two" else 1
        options["prefill"] = PrefillOptions(mode="int8", processors=processors)
    if predictor:
        options["experts"] = ExpertOptions(predictor=predictor)
    options = dataclasses.replace(OPTIONS, **options)
    engine = Engine.open(path, options=options, speculation=speculation, adapter=adapter, warm_up=False)
    if options.levels or options.kv_codec:
        engine.warm_up()
    else:
        engine.warm_up(prompt_tokens=100, max_tokens=28)
    return engine


def open_streamed(path: Path, share: float, *, experts: int = 0, **options: Any) -> Engine:
    """An engine with memory for a share of a bundle's weights, or for so many of its largest experts."""
    speculation = options.get("speculation")
    trees = {} if speculation is None else {"trees": speculation.trees}
    own = {name: value for name, value in options.items() if name in ("kv_codec", "levels")}
    with contextlib.closing(Engine.open(path, options=OPTIONS, warm_up=False)) as whole:
        bundle = whole.model.bundle
        resolved = dataclasses.replace(whole.options, **own, **trees)
        drafts = 0 if speculation is None else drafter_bytes(speculation, OPTIONS.context_tokens, bundle.cfg)
        if experts:
            sizes = [each.size_bytes for name, each in bundle.layout.segments.items() if ".experts." in name]
            memory = budget_with_experts(bundle, resolved, drafts + experts * (max(sizes) + 4096))
        else:
            weights = int(share * bundle.weight_bytes)
            memory = whole_budget(fixed_bytes(bundle.cfg, resolved) + drafts + weights)
    engine = open_engine(path, memory_bytes=memory, **options)
    assert engine.model.streamed is not None
    return engine


def drafting(drafter: str, *, model: Path | str | None = None, level: int = 0) -> SpeculationOptions:
    """Drafts by "model", "level" or "ngram", or by "lookup" beside a model."""
    lookup = drafter == "lookup"
    return dataclasses.replace(
        _ALWAYS, drafter="model" if lookup else drafter, model=model, level=level, lookup=lookup
    )


def sampled(**changes: Any) -> GenerationConfig:
    """A drawn answer with other sampling."""
    return dataclasses.replace(GREEDY, sampling=Sampling(**{"temperature": 0.8, "seed": 7, **changes}))


def answered(
    engine: Engine,
    prompt: str | Sequence[int],
    config: GenerationConfig = GREEDY,
    *,
    sinks: int | None = None,
    **more: Any,
) -> Answer:
    """What an engine answers; with `sinks` it slides past its window."""
    if sinks is not None:
        more["sliding"] = Sliding(sink_tokens=sinks)
    return written(prompt, engine.stream(prompt, config, **more).result())


def both(engine: Engine, prompt: str | Sequence[int], **more: Any) -> list[Answer]:
    """The greedy and the drawn answer."""
    return [answered(engine, prompt, config, **more) for config in (GREEDY, DRAWN)]


def talked(
    engine: Engine, turns: Sequence[Sequence[int]], config: GenerationConfig, **more: Any
) -> list[Answer]:
    """The answers to turns of one conversation, each of which feeds only what is new."""
    session, answers, sequence = Session(), [], []
    for turn in turns:
        sequence = [*sequence, *turn]
        answers.append(answered(engine, sequence, config, session=session, **more))
        sequence += answers[-1]["tokens"]
    return answers


def chatted(engine: Engine, messages: Sequence[dict[str, str]], config: GenerationConfig) -> Answer:
    """The answer to a conversation through the chat template."""
    text = engine.tokenizer.chat_text(list(messages)).text
    return written(text, engine.chat(messages, config).result())


def written(prompt: str | Sequence[int], generation: Any) -> Answer:
    """What is kept of an answer."""
    answer = {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "tokens": generation.tokens,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "reused_tokens": generation.reused_tokens,
    }
    return answer if generation.stop_string is None else {**answer, "stop_string": generation.stop_string}


def counted(engine: Engine) -> Answer:
    """What was drafted so far and what became of it."""
    assert engine.speculation is not None
    counts = engine.speculation.counts
    names = ("nodes", "accepted", "tokens", "plain_tokens")
    return {"rounds": counts.verifications, **{name: getattr(counts, name) for name in names}}


@contextlib.contextmanager
def open_contexts(engine: Engine, folder: Path, **options: Any) -> Iterator[Contexts]:
    """Contexts in a folder, which read what is not in memory."""
    contexts = Contexts(engine, ContextOptions(folder=folder, **{"recompute": False, **options}))
    try:
        yield contexts
    finally:
        contexts.close()


def new_context(contexts: Contexts, **options: Any) -> Context:
    """A context of an app."""
    return Context(contexts, contexts.create("mail", **options))


def found_context(contexts: Contexts, context: Context) -> Context:
    """The same context in a store that was opened again."""
    return Context(contexts, contexts.record(context.app, context.name))


def forget_resident(contexts: Contexts) -> None:
    """Lets all chunks leave memory."""
    contexts.memory.reclaim(contexts.memory.budget_bytes)


def said(
    context: Context, turn: str | Sequence[int], *, drawn: bool = False, tokens: int = 6, **more: Any
) -> Answer:
    """What a context answers, and how it came back."""
    sampling = DRAWN.sampling if drawn else None
    answer = context.generate(turn, max_tokens=tokens, ignore_eos=True, sampling=sampling, **more).result()
    how = answer.restoration
    back = {"resident": how.resident, "read": list(how.read), "computed": list(how.computed)}
    return {**written(turn, answer), **back, "bits": list(context.record.bits)}


def open_service(engine: Engine, *, proposer: Any = None) -> LLMService:
    """A service whose device takes a round time for every level, so that no plan depends on a clock."""
    levels = engine.levels
    profile = DeviceProfile(
        levels=levels,
        tokens=(16, 128),
        chunk_tokens=engine.options.chunk_tokens,
        ttft_ms=tuple((level * 1e3, level * 1e4) for level in levels),
        tpot_ms=tuple((level * 1e3,) * 2 for level in levels),
    )
    if proposer is None:
        tiny = read_tiny_lm(engine.model.bundle)
        assert tiny is not None
        proposer = TinyPlanner(tiny, levels)
    return LLMService(engine, profile, Planner(profile, levels, proposer, margin=1.0))


def called(service: LLMService, prompt: str, **call: Any) -> Answer:
    """What a service plans and answers."""
    answer = service.call(prompt, **call).result()
    plan = answer.plan
    planned = {"level": plan.level, "source": plan.source, "kept": plan.kept.tolist()}
    return {**written(prompt, answer), **planned, "slo": call["slo"]}


def export_programs(bundle: Path, folder: Path) -> Path:
    """StableHLO programs of a bundle and its level 50."""
    # Here, because exporters are not installed everywhere.
    from jaxllm.export.signatures import ExportPlan
    from jaxllm.export.stablehlo import export_stablehlo
    from jaxllm.export.subject import read_subject

    plan = ExportPlan(context_tokens=128, chunk_tokens=(16,), verify_tokens=(8,), levels=(50,))
    export_stablehlo(read_subject(bundle, levels=(50,)), folder, plan, platforms=("cpu",))
    return folder


def open_programs(folder: Path, *, level: int = 100, speculation: SpeculationOptions | None = None) -> Engine:
    """An engine over exported programs."""
    return open_program(folder, level=level, speculation=speculation)
