"""Attention over stored chunks together with everything else that an engine can do: it answers as decoded
chunks do, or is refused by name."""

import dataclasses
import functools
import re

import pytest

from jaxllm import Engine
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import batchable, decode_together, step
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests.kernels.switching import needs_native
from tests.models.test_lora import random_adapter
from tests.serving.contexts.conftest import CFG, OPTIONS
from tests.serving.contexts.talking import TURNS, new, say
from tests.tiny import tiny_params, write_tiny_bundle

pytestmark = needs_native


# Engines by name: their weights, and what they do besides.
KINDS = {
    "int8": ("int8", {"adapter_rank": 4, "batch_rows": (2, 4)}, None),
    "int8-nested": ("int8-nested", {}, None),
    "drafts": ("int8", {}, SpeculationOptions(drafter="ngram")),
}


@pytest.fixture(scope="module")
def bundle_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("combinations")

    @functools.cache
    def written(weights):
        return write_tiny_bundle(folder / f"{weights}.jaxllm", weights, cfg=CFG, params=tiny_params(CFG))

    return written


@pytest.fixture(scope="module")
def engine_of(bundle_of):
    """Engines of a kind, whose answers decode chunks or do not, each opened once."""
    opened = {}

    def engine(kind, coded):
        if (kind, coded) not in opened:
            weights, more, speculation = KINDS[kind]
            asked = {"kv_codec": "raw", "attend_coded": coded, **more}
            opened[kind, coded] = opened_with(bundle_of(weights), asked, speculation)
        return opened[kind, coded]

    yield engine
    for each in opened.values():
        each.close()


@pytest.fixture
def alike(engine_of, tmp_path):
    """What a function returns of contexts whose answers decode chunks, which is what it returns of others."""

    def run(kind, talk):
        found = []
        for coded in (False, True):
            folder = tmp_path / f"{talk.__name__}-{coded}"
            contexts = Contexts(engine_of(kind, coded), ContextOptions(folder=folder))
            try:
                found.append(talk(contexts))
                assert contexts.store.verify() == []
            finally:
                contexts.close()
        assert found[0] == found[1]
        return found[1]

    return run


def opened_with(path, given, speculation=None):
    return Engine.open(path, options=dataclasses.replace(OPTIONS, **given), speculation=speculation)


def by_turns(contexts, count=6, **options):
    """Answers of two contexts that take turns, so that each call restores its own."""
    mine = [new(contexts, **options) for _ in range(2)]
    said = []
    for turn in range(3):
        for context, turns in zip(mine, TURNS, strict=False):
            said.append(say(context, turns[turn], count).tokens)
    if contexts.engine.options.attend_coded:
        assert contexts._last[1].cache.coded_tokens > 0
    return said


def together(contexts):
    """Answers that are decoded together, one without a context among them."""
    mine = [new(contexts) for _ in range(3)]
    for context, turns in zip(mine, TURNS, strict=True):
        say(context, turns[0])
    config = {"max_tokens": 12, "ignore_eos": True}
    runs = [each.generate(turns[1], **config) for each, turns in zip(mine, TURNS, strict=True)]
    runs.append(contexts.engine.stream(TURNS[0][2], GenerationConfig(**config)))
    while running := [run for run in runs if run.stage != "ended"]:
        for run in running:
            if not batchable(run):
                step(run)
        decode_together([run for run in running if batchable(run)])
    return [run.tokens for run in runs]


def drafted(contexts):
    mine, turn = [new(contexts) for _ in range(2)], [5, 6, 7, 8] * 6
    return [say(each, turn, 16).tokens for _ in range(2) for each in mine]


def beginnings_that_are_shared(contexts):
    said = []
    for number, turns in enumerate(TURNS):
        answer = say(new(contexts), [*range(10, 60), *turns[0][:9]])
        said.append(answer.tokens)
        contexts.store.wait()
        assert answer.restoration.shared == (3 if number else 0)
    return said


def caches_of_ended_answers_that_are_copied(contexts):
    """As the service does for prompts that begin alike, beside contexts."""
    engine, runner = contexts.engine, contexts.engine.runner
    runner.fill(runner.fork_buckets())
    say(new(contexts), TURNS[1][0])
    first = engine.generate(TURNS[0][0], GenerationConfig(max_tokens=4, ignore_eos=True))
    session = dataclasses.replace(first.session, cache=runner.fork(first.session.cache, 32))
    session.tokens = session.tokens[:32]
    config = GenerationConfig(max_tokens=8, ignore_eos=True)
    answer = engine.stream([*TURNS[0][0][:32], *TURNS[0][1]], config, session=session).result()
    assert answer.reused_tokens == 32
    return answer.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "talk"),
    [
        ("int8-nested", by_turns),
        ("int8", together),
        ("int8", beginnings_that_are_shared),
        ("int8", caches_of_ended_answers_that_are_copied),
        ("drafts", drafted),
    ],
)
def test_what_attends_to_coded_chunks_answers_alike(alike, kind, talk):
    alike(kind, talk)


@pytest.mark.slow
def test_adapters(alike, tmp_path):
    """And what the same engines say without one."""
    lora = LoraConfig(rank=4, alpha=16, targets=("attn.q", "attn.v", "ffn.down"))
    write_adapter(tmp_path / "adapter", CFG, lora, random_adapter(CFG, lora, 3))

    def adapted(contexts):
        contexts.engine.set_adapter(tmp_path / "adapter")
        said = by_turns(contexts)
        contexts.engine.set_adapter(None)
        return said

    assert alike("int8", adapted) != alike("int8", by_turns)


def test_a_model_that_drafts_by_itself_does_not_where_it_could_not(bundle_of, monkeypatch):
    monkeypatch.setattr("jaxllm.serving.opening.engine._LEAST_DRAFTING_BYTES", 0)
    for coded in (False, True):
        asked = dataclasses.replace(OPTIONS, kv_codec="raw", attend_coded=coded)
        speculation = SpeculationOptions.by_itself()
        engine = Engine.open(bundle_of("int8-nested"), options=asked, speculation=speculation, warm_up=False)
        assert (engine.speculation is None) == coded
        engine.close()


@pytest.mark.parametrize(
    ("options", "speculation", "why"),
    [
        (
            {},
            SpeculationOptions(drafter="nested"),
            "does not attend to stored chunks: leave out attend_coded",
        ),
        ({"cache_dtype": "bfloat16"}, None, "no native kernels here attend to caches of bfloat16"),
    ],
)
def test_what_cannot_is_refused_by_name(bundle_of, options, speculation, why):
    given = {"kv_codec": "raw", "attend_coded": True, **options}
    path = bundle_of("int8-nested")
    with pytest.raises(ConfigError, match=re.escape(why)):
        opened_with(path, given, speculation)


def test_integer_prefill_is_refused(bundle_of, monkeypatch):
    monkeypatch.setattr("jaxllm.serving.opening.make_runners._prefill_modes", lambda *_, **__: object())
    path = bundle_of("int8")
    with pytest.raises(ConfigError, match="because it prefills in integers"):
        opened_with(path, {"kv_codec": "raw", "attend_coded": True})
