"""Cases of what runs in parts: streamed weights, integer prefill, drafts, contexts and exported programs."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from jaxllm.serving.engine.engine import Engine
from tests.goldens import opening
from tests.goldens.opening import GREEDY, Answer
from tests.goldens.registry import FEW_WORDS, LONG, PROMPT, TURNS, Models, case, cases

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
