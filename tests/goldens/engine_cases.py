"""Cases of engines in memory: levels, what a request asks for, adapters, plans, and the packaged models."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxllm.kernels import native
from tests.goldens import opening
from tests.goldens.opening import DRAWN, GREEDY, Answer
from tests.goldens.registry import LONG, PROMPT, STORY, TURNS, Models, case, cases


@cases(
    {
        "memory-f32": ("f32", (50,)),
        "memory-bf16": ("bf16", ()),
        "memory-int8": ("int8", (20, 50)),
        "memory-int4": ("int4", (20, 50)),
    }
)
def in_memory(models: Models, weights: str, levels: tuple[int, ...]) -> list[Answer]:
    """Each level, from text and from token ids."""
    engine = models.engine(weights, levels=levels)
    return [
        {**answer, "level": level}
        for level in (*levels, 100)
        for prompt in (PROMPT, LONG)
        for answer in opening.both(engine, prompt, level=level)
    ]


@case("memory-as_a_level")
def as_a_level(models: Models) -> list[Answer]:
    """An engine that is a level of another."""
    return opening.both(models.engine("int8", levels=(20, 50)).at(20), LONG)


@case("memory-without_native_kernels")
def without_native_kernels(models: Models) -> list[Answer]:
    with without_kernels(), contextlib.closing(opening.open_engine(models.bundles.elastic("int8"))) as engine:
        return opening.both(engine, LONG)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Graphs that are traced within are those of a process without native kernels."""
    before = native.kernels
    native.kernels = lambda: native.Kernels("xla", "a golden says so")
    try:
        yield
    finally:
        native.kernels = before


@case("memory-growing_cache")
def growing_cache(models: Models) -> list[Answer]:
    """An answer that moves into longer caches, up to the end of the window, and one that slides past it."""
    options = {"cache_tokens": (64, 128), "decode_block": 8}
    with contextlib.closing(opening.open_engine(models.bundles.elastic("int8"), **options)) as engine:
        engine.warm_up()
        long = dataclasses.replace(GREEDY, max_tokens=150)
        drawn = dataclasses.replace(DRAWN, max_tokens=110)
        return [
            opening.answered(engine, [1, 50, 7], long),
            opening.answered(engine, [1, 50, 7], drawn),
            opening.answered(engine, LONG, long, sinks=4),
        ]


@case("request-sampling")
def sampling(models: Models) -> list[Answer]:
    engine, ask = models.engine("int8", levels=(20, 50)), opening.sampled
    banned = tuple((token, float("-inf")) for token in opening.both(engine, PROMPT)[0]["tokens"][:3])
    configs = {
        "temperature": ask(temperature=1.5, seed=1),
        "seed": ask(seed=2**63 + 5),
        "top_k": ask(top_k=3),
        "top_p": ask(top_p=0.5),
        "min_p": ask(min_p=0.2),
        "repetition": ask(temperature=0.0, repetition_penalty=1.5),
        "presence": ask(temperature=0.0, presence_penalty=2.0),
        "frequency": ask(frequency_penalty=0.7),
        "bias": ask(temperature=0.0, logit_bias=(*banned, (65, 3.0))),
        "all": ask(top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3),
    }
    return [{**opening.answered(engine, PROMPT, config), "asked": name} for name, config in configs.items()]


@case("request-stops")
def stops(models: Models) -> list[Answer]:
    """Strings and tokens that end an answer, the model's own end, and where no stop comes."""
    engine = models.engine("int8", levels=(20, 50))
    plain, answers = opening.answered(engine, PROMPT), []
    tokens, text = plain["tokens"], plain["text"]
    for how in (
        {"stop": (text[7:9],)},
        {"stop": (text[4:7], text[9:11])},
        {"stop": ("never said",)},
        {"stop_token_ids": (tokens[5],)},
        {"stop_token_ids": (tokens[9],), "stop": (text[-4:],)},
        {"ignore_eos": False},
        {"max_tokens": 1},
    ):
        config = dataclasses.replace(GREEDY, **how)
        answers.append({**opening.answered(engine, PROMPT, config), "asked": json.loads(json.dumps(how))})
    return answers


@case("request-end_of_text")
def end_of_text(models: Models) -> list[Answer]:
    """Packaged models end their stories themselves, or at a stop."""
    engine = models.packaged("default", (20, 50))
    config = dataclasses.replace(GREEDY, max_tokens=60, ignore_eos=False)
    return [opening.answered(engine, STORY, dataclasses.replace(config, stop=stop)) for stop in ((), (".",))]


@case("request-turns")
def turns(models: Models) -> list[Answer]:
    """A conversation, and one whose answer stops; another beginning uses what is common."""
    engine = models.engine("int8", levels=(20, 50))
    answers = [each for config in (GREEDY, DRAWN) for each in opening.talked(engine, TURNS, config)]
    session = opening.Session()
    first = opening.answered(engine, LONG, session=session)
    stop = dataclasses.replace(GREEDY, stop_token_ids=(first["tokens"][6],))
    return [
        *answers,
        first,
        opening.answered(engine, LONG, stop, session=session),
        opening.answered(engine, LONG, session=session),
        opening.answered(engine, [*LONG[:20], 9, 9], session=session),
        opening.answered(engine, [*LONG[:20], 9, 9], session=session, level=50),
    ]


@case("request-chat")
def chat(models: Models) -> list[Answer]:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the hello"},
        {"role": "user", "content": "the hell?"},
    ]
    tiny = [opening.chatted(models.engine("int8", levels=(20, 50)), messages[:end], GREEDY) for end in (1, 3)]
    return [*tiny, opening.chatted(models.engine("f32", levels=(50,)), messages, DRAWN)]


@cases({"adapters-f32": ("f32", ()), "adapters-int8": ("int8", (50,))})
def adapters(models: Models, weights: str, levels: tuple[int, ...]) -> list[Answer]:
    """Opened with one, without, with another in the middle of a conversation, and at a level."""
    bundles = models.bundles
    path, rank = bundles.elastic(weights), {"adapter_rank": 4, "levels": levels}
    with contextlib.closing(opening.open_engine(path, adapter=bundles.adapter(0), **rank)) as engine:
        answers, session = opening.both(engine, LONG), opening.Session()
        for number in (None, 1, 1, 0):
            engine.set_adapter(None if number is None else bundles.adapter(number))
            answers.append({**opening.answered(engine, LONG, session=session), "adapter": number})
        return [*answers, *(opening.answered(engine, LONG, DRAWN, level=level) for level in levels)]


class _FirstWords:
    """Proposes half the model and the first half of the prompt."""

    prompt_ratios = (0.5, 1.0)

    def propose(self, prompt: Any, slo: Any, allowed: Any) -> Any:
        from jaxllm.serving.elastic.planner import Proposal

        return Proposal(level=50, prompt_ratio=0.5, scores=self.scores(prompt))

    def scores(self, prompt: Any) -> np.ndarray:
        return -np.arange(len(prompt.ids), dtype=float)

    def planning_ms(self, tokens: int) -> float:
        return 0.0


@case("service-plans")
def plans(models: Models) -> list[Answer]:
    service = opening.open_service(models.engine("int8", levels=(20, 50)), proposer=_FirstWords())
    text = "the quick brown fox jumps over the lazy dog and hides under the old oak"
    return [
        opening.called(service, text, slo=slo, instruction="say it again", max_tokens=8)
        for slo in ("<100,100>", "<45,60>", "<60,55>", "<20,20>", "<1,1>")
    ]


@case("service-tiny_lm")
def tiny_lm_plans(models: Models) -> list[Answer]:
    """With the tiny LM of the bundle."""
    service = opening.open_service(models.engine("int8", levels=(20, 50)))
    text = "the quick brown fox jumps over the lazy dog"
    return [
        opening.called(service, text, slo=slo, max_tokens=8)
        for slo in ("<100,100>", "<70,70>", "<30,50>", "<20,20>")
    ]


@cases(
    {"packaged-default": ("default", (20, 50)), "packaged-moe": ("moe", ()), "packaged-draft": ("draft", ())}
)
def packaged(models: Models, name: str, levels: tuple[int, ...]) -> list[Answer]:
    engine = models.packaged(name, levels)
    return [
        {**answer, "level": level}
        for level in (*levels, 100)
        for answer in opening.both(engine, STORY, level=level)
    ]


@case("packaged-integer_prefill")
def packaged_prefill(models: Models) -> list[Answer]:
    prompt = f"{STORY} loved to play. {STORY} had a big red ball."
    with contextlib.closing(opening.open_engine("draft", prefill="one")) as engine:
        return opening.both(engine, prompt)


@case("packaged-drafted")
def packaged_drafts(models: Models) -> list[Answer]:
    speculation = opening.drafting("ngram")
    with contextlib.closing(opening.open_engine("draft", speculation=speculation)) as engine:
        prompt = f"{STORY} loved to play. {STORY}"
        return [*opening.both(engine, prompt), opening.counted(engine)]


@case("packaged-streamed_experts")
def packaged_experts(models: Models) -> list[Answer]:
    from jaxllm.serving.ground.bundles import find_model

    with contextlib.closing(opening.open_streamed(find_model("moe"), 0, experts=10)) as engine:
        return opening.both(engine, STORY)
