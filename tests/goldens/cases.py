"""All cases, by name, and where their answers can be compared.

A case's name is the golden's file, a dash and its name in there. Cases read the same prompts, so that answers
of runners that must agree can be compared by eye. Every model is tiny and random, or packaged, or SmolLM2.

Recorded are the answers of the native kernels for AVX-512. Most models are so sure of theirs that no token
hangs on the order in which floats are summed: other instruction sets, other processors and any number of
threads give the same, with exceptions that `reason_to_skip` names.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.kernels import native
from jaxllm.serving.engine.engine import Engine
from tests.goldens import opening
from tests.goldens.bundles import SMOLLM2, Bundles
from tests.goldens.opening import DRAWN, GREEDY, Answer

PROMPT = "the hello there, hello the hello there"
STORY = "Once upon a time, there was a little girl named Lily who"
_DRAW = np.random.default_rng(5)
# Longer than two prefill chunks, than one and than none.
LONG = _DRAW.integers(0, 250, 41).tolist()
TURNS = [_DRAW.integers(0, 250, size).tolist() for size in (37, 5, 21)]
# Answers that repeat themselves, greedy and drawn: what the text has said before is drafted.
FEW_WORDS = tuple(
    opening.sampled(temperature=temperature, logit_bias=tuple((token, 60.0) for token in (77, 101, 105)))
    for temperature in (0.0, 0.8)
)


class Models:
    """Bundles of a folder and the engines that cases share."""

    def __init__(self, folder: Path) -> None:
        self.bundles = Bundles(folder)
        self._folder, self._count = folder, 0
        self._exits = contextlib.ExitStack()
        self._opened = functools.cache(self._open)

    def engine(self, weights: str, codec: str = "", levels: tuple[int, ...] = ()) -> Engine:
        """The elastic model in memory, with some levels."""
        return self._opened(self.bundles.elastic(weights), codec, levels)

    def packaged(self, name: str, levels: tuple[int, ...] = ()) -> Engine:
        """A packaged model in memory."""
        return self._opened(name, "", levels)

    def new_folder(self) -> Path:
        """One that is nobody's yet."""
        self._count += 1
        return self._folder / f"store-{self._count}"

    def close(self) -> None:
        """Closes all engines."""
        self._exits.close()

    def _open(self, path: Path | str, codec: str, levels: tuple[int, ...]) -> Engine:
        engine = opening.open_engine(path, levels=levels, kv_codec=codec)
        return self._exits.enter_context(contextlib.closing(engine))

    def programs(self) -> Path:
        """The folder of exported programs."""
        folder = self._folder / "programs"
        return folder if folder.exists() else opening.export_programs(self.bundles.shallow(), folder)


Case = Callable[[Models], list[Answer]]
Making = Callable[..., list[Answer]]
CASES: dict[str, Case] = {}


def cases(named: Mapping[str, Sequence[object]]) -> Callable[[Making], Making]:
    """Registers cases by what the function requires after the models."""

    def registered(function: Making) -> Making:
        for name, values in named.items():
            assert name not in CASES, name
            CASES[name] = lambda models, values=values: function(models, *values)
        return function

    return registered


def case(name: str) -> Callable[[Making], Making]:
    """Registers a function of the models alone."""
    return cases({name: ()})


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


ROOT = Path(__file__).parents[2]


@cases({"streamed-f32": ("f32", ()), "streamed-int8": ("int8", (50,)), "streamed-int4": ("int4", ())})
def streamed(models: Models, weights: str, levels: tuple[int, ...]) -> list[Answer]:
    path = models.bundles.deep(weights)
    with contextlib.closing(opening.open_streamed(path, 0.7, levels=levels)) as engine:
        return [
            *(answer for level in (*levels, 100) for answer in opening.both(engine, LONG, level=level)),
            *opening.both(engine, PROMPT),
            *opening.talked(engine, TURNS[:2], GREEDY),
        ]


@case("experts-in_memory")
def experts_in_memory(models: Models) -> list[Answer]:
    with contextlib.closing(opening.open_engine(models.bundles.mixture("int8"))) as engine:
        return [*opening.both(engine, PROMPT), *opening.both(engine, LONG)]


@cases(
    {
        "experts-foreseen_by_router": ("router",),
        "experts-foreseen_by_paths": ("paths",),
        "experts-foreseen_by_tokens": ("tokens",),
    }
)
def experts_streamed(models: Models, predictor: str) -> list[Answer]:
    path = models.bundles.mixture("int8")
    with contextlib.closing(opening.open_streamed(path, 0, experts=5, predictor=predictor)) as engine:
        return [
            *opening.both(engine, PROMPT),
            *opening.both(engine, LONG),
            *opening.talked(engine, TURNS[:2], GREEDY),
        ]


@case("prefill-one_processor")
def one_processor(models: Models) -> list[Answer]:
    with contextlib.closing(opening.open_engine(models.bundles.calibrated(), prefill="one")) as engine:
        return prefilled(engine)


@case("prefill-two_processors")
def two_processors(models: Models) -> list[Answer]:
    """In a process of its own, whose JAX has a second device."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.goldens.two_processors", str(models.bundles.calibrated())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def prefilled(engine: Engine) -> list[Answer]:
    """Prompts of chunks that are full and not, and a conversation."""
    return [*opening.both(engine, LONG), *opening.talked(engine, TURNS, GREEDY)]


@cases(
    {
        "drafts-by_a_model": ("model", ""),
        "drafts-by_a_level": ("level", ""),
        "drafts-by_n_grams": ("ngram", ""),
        "drafts-by_a_model_and_lookup": ("lookup", ""),
        "drafts-streamed_by_a_model": ("model", "layers"),
        "drafts-streamed_by_n_grams": ("ngram", "layers"),
        "drafts-experts_by_n_grams": ("ngram", "experts"),
    }
)
def drafts(models: Models, drafter: str, streamed: str) -> list[Answer]:
    bundles = models.bundles
    draft = bundles.draft("deep" if streamed else "elastic") if drafter in ("model", "lookup") else None
    speculation = opening.drafting(drafter, model=draft, level=50 * (drafter == "level"))
    if streamed == "layers":
        engine = opening.open_streamed(bundles.deep("int8"), 0.8, speculation=speculation)
    elif streamed:
        engine = opening.open_streamed(bundles.mixture("int8"), 0, experts=5, speculation=speculation)
    else:
        engine = opening.open_engine(bundles.elastic("int8"), speculation=speculation)
    with contextlib.closing(engine):
        answers = [*opening.both(engine, PROMPT), *opening.both(engine, 3 * LONG[:8])]
        answers += [opening.answered(engine, PROMPT, config) for config in FEW_WORDS]
        stop = dataclasses.replace(GREEDY, stop_token_ids=(answers[0]["tokens"][10],))
        answers.append(opening.answered(engine, PROMPT, stop))
        return [*answers, *opening.talked(engine, TURNS[:2], GREEDY), opening.counted(engine)]


@cases(
    {
        "contexts-raw": ("raw", "f32", 100),
        "contexts-raw_int8": ("raw", "int8", 100),
        "contexts-raw_level_50": ("raw", "int8", 50),
        "contexts-channel": ("channel", "int8", 100),
        "contexts-kivi": ("kivi", "f32", 100),
        "contexts-rotated": ("rotated", "int8", 100),
    }
)
def contexts(models: Models, codec: str, weights: str, level: int) -> list[Answer]:
    """Two that take turns, of which one is driven out of memory; and what comes back after a restart."""
    engine = models.engine(weights, codec, (50,) if level == 50 else ())
    folder, answers = models.new_folder(), []
    with opening.open_contexts(engine, folder) as opened:
        one, two = (opening.new_context(opened, level=level) for _ in range(2))
        answers += [opening.said(one, TURNS[0]), opening.said(two, TURNS[2], drawn=True)]
        answers += [opening.said(one, TURNS[1]), opening.said(one, TURNS[2], drawn=True)]
        answers.append(opening.said(two, TURNS[1]))
        opening.forget_resident(opened)
        answers.append(opening.said(one, TURNS[1], tokens=4))
    with opening.open_contexts(engine, folder) as opened:
        two = opening.found_context(opened, two)
        return [*answers, opening.said(two, TURNS[1]), opening.said(two, LONG, tokens=60, slide=True)]


@case("contexts-computed_again")
def computed_again(models: Models) -> list[Answer]:
    """Where nothing is written, what left memory is computed from its tokens."""
    engine = models.engine("f32", "raw")
    with opening.open_contexts(engine, models.new_folder(), writing="never", recompute=True) as opened:
        one, two = (opening.new_context(opened) for _ in range(2))
        answers = [opening.said(one, TURNS[0]), opening.said(two, TURNS[2])]
        opening.forget_resident(opened)
        return [*answers, opening.said(one, TURNS[1])]


@case("contexts-narrow")
def narrow(models: Models) -> list[Answer]:
    """As few bits as there are, of a chat whose window slides."""
    engine = models.engine("int8", "channel")
    with opening.open_contexts(engine, models.new_folder(), ratio=0.4, newest_chunks=0) as opened:
        one, two = (opening.new_context(opened) for _ in range(2))
        answers = [opening.said(one, "hello the hello there", tokens=40), opening.said(two, [1])]
        answers.append(opening.said(one, "the hell", tokens=20, drawn=True))
        answers += [opening.said(two, TURNS[1]), opening.said(one, "the the", tokens=50, slide=True)]
        return [*answers, opening.said(two, [2]), opening.said(one, "hello", tokens=10)]


@case("contexts-streamed")
def streamed_contexts(models: Models) -> list[Answer]:
    path, folder = models.bundles.deep("int8"), models.new_folder()
    with (
        contextlib.closing(opening.open_streamed(path, 0.7, kv_codec="channel")) as engine,
        opening.open_contexts(engine, folder) as opened,
    ):
        one, two = (opening.new_context(opened) for _ in range(2))
        answers = [opening.said(one, TURNS[0]), opening.said(two, TURNS[2])]
        opening.forget_resident(opened)
        return [*answers, opening.said(one, TURNS[1])]


@cases({"programs-whole": (100,), "programs-level_50": (50,)})
def programs(models: Models, level: int) -> list[Answer]:
    engine = opening.open_programs(models.programs(), level=level)
    return [
        *opening.both(engine, PROMPT),
        *opening.both(engine, LONG),
        *opening.talked(engine, TURNS, GREEDY),
    ]


@cases(
    {
        "programs-drafted_by_a_model": ("model",),
        "programs-drafted_by_a_level": ("level",),
        "programs-drafted_by_n_grams": ("ngram",),
        "programs-drafted_by_a_model_and_lookup": ("lookup",),
    }
)
def drafted_programs(models: Models, drafter: str) -> list[Answer]:
    named = {"model": models.programs()} if drafter in ("model", "lookup") else {}
    speculation = opening.drafting(drafter, level=50 * (drafter == "level"), **named)
    engine = opening.open_programs(models.programs(), speculation=speculation)
    return [
        *opening.both(engine, PROMPT),
        *(opening.answered(engine, PROMPT, config) for config in FEW_WORDS),
        *opening.talked(engine, TURNS[:2], GREEDY),
        opening.counted(engine),
    ]


CHAT = [
    {"role": "system", "content": "You answer in short sentences."},
    {"role": "user", "content": "Name three large cities of France, and say what each is known for."},
]


@cases(
    {
        "smollm2-int8": ("int8", 0.0, ()),
        "smollm2-int4": ("int4", 0.0, ()),
        "smollm2-streamed": ("int8", 0.8, ()),
        "smollm2-level_50": ("int8", 0.0, (50,)),
    }
)
def smollm2(models: Models, weights: Any, streamed: float, levels: tuple[int, ...]) -> list[Answer]:
    """A real model in memory and from storage, and a level of it; in floats it is `tests/parity`'s."""
    path = models.bundles.smollm2(weights)
    engine = opening.open_streamed(path, streamed) if streamed else opening.open_engine(path, levels=levels)
    with contextlib.closing(engine):
        prompt = engine.tokenizer.encode_chat(CHAT)
        return [each for level in (*levels, 100) for each in opening.both(engine, prompt, level=level)]


_RECORDED_WITH = "avx512"
# Weights in floats, or graphs of XLA's own.
_WITHOUT_KERNELS = (
    "memory-f32", "memory-bf16", "memory-without_native_kernels", "adapters-f32", "streamed-f32",
    "contexts-raw", "contexts-kivi", "contexts-computed_again", "programs-whole", "programs-level_50",
    "programs-drafted_by_a_model", "programs-drafted_by_a_level", "programs-drafted_by_n_grams",
    "programs-drafted_by_a_model_and_lookup",
)  # fmt: skip
# Of 8 bits, where two tokens are nearly as likely, so that a step of an activation decides.
_NEAR_TIES = (
    "memory-growing_cache", "request-end_of_text", "request-turns", "packaged-default", "streamed-int8",
    "drafts-streamed_by_a_model", "drafts-streamed_by_n_grams",
)  # fmt: skip


def reason_to_skip(name: str) -> str | None:
    """Why a case cannot be compared here; None if it can."""
    kernels = native.kernels()
    if name.startswith("programs") and importlib.util.find_spec("flatbuffers") is None:
        return "exporters are not installed"
    if name == "prefill-two_processors" and len(os.sched_getaffinity(0)) < 2:
        return "takes two cores"
    if not kernels.native and name not in _WITHOUT_KERNELS:
        return "recorded with native kernels, which round activations to 8 bits as XLA does not"
    if name.startswith("smollm2") and not SMOLLM2.is_file():
        return "SmolLM2-135M-Instruct is missing"
    rounds = "int4" in name or name.startswith("smollm2") or name in _NEAR_TIES
    if rounds and kernels.name != _RECORDED_WITH:
        return (
            f"recorded with {_RECORDED_WITH}: {kernels.name} sums groups of weights in another order, "
            "and activations then round to another step now and then"
        )
    return None
