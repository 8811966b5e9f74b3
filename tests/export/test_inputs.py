"""Programs that accept more than text: adapters as an input, with text equal to the live engine's; chunks of
contexts, to the bytes of the live service's codec; and rows of a prompt for a tiny LM, which plans as the
live service does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.config import FULL_LEVEL
from jaxllm.contexts.codecs import WIDTHS, ChunkShape
from jaxllm.contexts.recompute import LOST
from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError, ContextGone, ProgramError
from jaxllm.export.device.contexts import ProgramChunks, ProgramContexts
from jaxllm.export.device.service import ProgramService
from jaxllm.export.folder_format.parts import adapter_file
from jaxllm.export.folder_format.signature import CHUNK_TOKENS, KEYS, VALUES, cache_shapes, chunk_format
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import AdapterOptions, read_subject
from jaxllm.kv.cache import Past
from jaxllm.kv.chunks import encode_chunks
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.elastic import tiny_lm as live_tiny_lm
from jaxllm.serving.elastic.planner import Planner
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.elastic.profiling import measure_coarsely
from jaxllm.serving.elastic.tiny_lm import TinyPlanner
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer
from tests.export.models import (
    CFG,
    CHUNKS,
    CONFIG,
    CONTEXT,
    OPTIONS,
    PROMPTS,
    exported,
    write_adapters,
    write_planned,
)  # fmt: skip
from tests.tiny import tiny_tokenizer

ADAPTED = ExportPlan(
    context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), verify_tokens=(8,), levels=(40,)
)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def wanted(elastic, given):
    """The live engine's answers by adapter and level."""
    live = Engine.open(elastic, options=dataclasses.replace(OPTIONS, adapter_rank=4))
    found = {}
    for name in (None, *given):
        live.set_adapter(None if name is None else given[name])
        found[name] = {level: answers(live, level) for level in (40, FULL_LEVEL)}
    assert len({str(found[name][level]) for name in found for level in (40, FULL_LEVEL)}) == 6
    return found


@pytest.fixture(scope="module", params=["stablehlo", "tflite"])
def adapted(request, elastic, given, tmp_path_factory):
    """Of a bundle whose level 40 has an adapter of its own."""
    subject = read_subject(elastic, levels=(40,), inputs=AdapterOptions(given=given))
    return exported(request.param, subject, tmp_path_factory.mktemp("programs") / "adapters", ADAPTED)


def answers(engine, level):
    return [engine.stream(each, CONFIG, level=level).result().tokens for each in PROMPTS[:4]]


def test_text_is_the_live_engines_with_each_adapter_and_none(adapted, wanted, compiles):
    with compiles() as count:
        for name in (None, "mail", "notes", "mail", None):
            adapted.set_adapter(name)
            for level in (40, FULL_LEVEL):
                assert answers(adapted, level) == wanted[name][level], (name, level)
        assert count() == 0


def test_adapters_of_other_names_and_sizes_are_refused(adapted):
    with pytest.raises(ConfigError, match="no adapter 'other', but mail, notes; export the model"):
        adapted.set_adapter("other")
    inputs = adapted.model.executor.manifest.adapters
    with pytest.raises(ProgramError, match=f"{adapter_file('mail')} has 4 bytes, not"):
        inputs.parsed("mail", bytes(4))


def test_a_context_keeps_its_adapter(adapted, wanted, tmp_path):
    contexts = ProgramContexts(adapted, tmp_path / "store", budget_bytes=1 << 20)
    service = ProgramService(adapted, measure_coarsely(adapted), contexts=contexts)
    context = service.new_context("app", adapter="notes")
    answer = context.answer(PROMPTS[2], CONFIG).result()
    assert answer.tokens == wanted["notes"][FULL_LEVEL][2]
    # Another one's calls do not change it.
    service.set_adapter(None)
    assert answers(adapted, FULL_LEVEL) == wanted[None][FULL_LEVEL]
    again = service.context("app", context.name)
    assert adapted.model.executor.adapters.used == "notes"
    assert again.answer([5], CONFIG).result().restoration.resident == 1
    record = dataclasses.replace(again.record.origin, adapter="of another folder")
    contexts.store.commit(dataclasses.replace(again.record, origin=record))
    with pytest.raises(ContextGone, match=r"adapter that is not among these programs \(of another folder\)"):
        service.context("app", context.name)
    contexts.close()


def test_a_rank_bounds_what_is_given(elastic, given):
    with pytest.raises(ConfigError, match="mail has rank 4, and programs take up to 2"):
        read_subject(elastic, inputs=AdapterOptions(given=given, rank=2))
    with pytest.raises(ConfigError, match="name an adapter, or give --adapter-rank"):
        AdapterOptions()
    assert read_subject(elastic, inputs=AdapterOptions(rank=2)).adapters.inputs.names == ()


# Codecs of contexts

CODED = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(32,))
GREEDY = GenerationConfig(max_tokens=6, ignore_eos=True)


def of_codec(kind, codec, elastic, place):
    plan = dataclasses.replace(CODED, codec=codec)
    return exported(kind, read_subject(elastic), place / "programs", plan)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("stablehlo", "channel"), ("stablehlo", "kivi"), ("tflite", "channel"), ("tflite", "rotated")],
)
def test_programs_encode_and_load_as_the_live_codec(kind, codec, elastic, tmp_path):
    """To the byte, whatever the magnitudes of channels, in chunks that do not come in order."""
    engine = of_codec(kind, codec, elastic, tmp_path)
    runner, draw = engine.runner, np.random.default_rng(0)
    scales = (10.0 ** draw.integers(-4, 3, CFG.head_dim)).astype(np.float32)
    rows = {
        name: draw.standard_normal(shape).astype(np.float32) * scales
        for name, shape in cache_shapes(CFG, CONTEXT).items()
    }
    cache, form = runner.restored(rows, CONTEXT), chunk_format(codec)
    wanted_chunks = [3, 0, 2]
    for bits in WIDTHS:
        chunks = ProgramChunks(runner, bits)
        found = chunks.encode(cache, dict.fromkeys(wanted_chunks, bits))
        encode = jax.jit(functools.partial(encode_chunks, form=form, bits=bits))
        at = np.array(wanted_chunks, np.int32)
        shape = ChunkShape(heads=CFG.kv_heads, tokens=CHUNK_TOKENS, width=CFG.head_dim)
        there = runner.rows(chunks.load(chunks.start(CONTEXT), found), CONTEXT)
        for layer in range(CFG.layers):
            keys, values = (jnp.asarray(rows[name.format(layer)]) for name in (KEYS, VALUES))
            blobs = np.asarray(encode(Past(keys, values), at))
            decoded = form.codec.decode(jnp.asarray(blobs), shape, bits)
            for place, number in enumerate(wanted_chunks):
                assert (found[number][1][layer] == blobs[place]).all()
                part = slice(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
                for name, side in zip((KEYS, VALUES), decoded, strict=True):
                    got = there[name.format(layer)][0, :, part]
                    np.testing.assert_allclose(got, np.asarray(side[place]), rtol=1e-6, atol=1e-6)
            assert not there[KEYS.format(layer)][0, :, CHUNK_TOKENS : 2 * CHUNK_TOKENS].any()


@pytest.mark.parametrize("kind", ["stablehlo", "tflite"])
def test_a_context_at_few_bits_outlives_its_process(kind, elastic, tmp_path):
    engine = of_codec(kind, "channel", elastic, tmp_path)
    turns = [[(5 * i + 3) % CFG.vocab_size for i in range(34)], [9, 8, 7]]
    sizes, answers = {}, {}
    for bits in (0, 8, 4):
        place = tmp_path / f"store{bits}"
        contexts = ProgramContexts(engine, place, budget_bytes=1 << 20, bits=bits)
        name = contexts.create("app").name
        Context(contexts, contexts.record("app", name)).answer(turns[0], GREEDY).result()
        record = contexts.record("app", name)
        sizes[bits] = sum(sum(record.origin.layer_bytes[each]) for each in record.bits if each != LOST)
        contexts.close()
        again = ProgramContexts(engine, place, budget_bytes=1 << 20, bits=bits)
        answer = Context(again, again.record("app", name)).answer(turns[1], GREEDY).result()
        assert answer.restoration.read == (0, 1)
        answers[bits] = answer.tokens
        again.close()
    assert answers[8] == answers[0]
    assert sizes[4] < sizes[8] < sizes[0]
    # Two chunks; of each value 8 bits, and a low and a scale for each channel of 16 tokens.
    assert sizes[8] * 32 == sizes[0] * (8 + 2)


def test_what_a_folder_lacks_is_refused(elastic, tmp_path):
    engine = of_codec("stablehlo", "", elastic, tmp_path)
    with pytest.raises(ConfigError, match=r"no programs of contexts at 8 bits.*--codec"):
        ProgramContexts(engine, tmp_path / "store", budget_bytes=1 << 20, bits=8)


# The tiny LM

WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away", "from", "a",
    "small", "cat",
]  # fmt: skip
# So slow that the time to plan does not count.
PROFILE = DeviceProfile(
    levels=(40, FULL_LEVEL), tokens=(1, 1000), chunk_tokens=(1,),
    ttft_ms=((400.0, 400_000.0), (1000.0, 1_000_000.0)), tpot_ms=((1600.0,) * 2, (4000.0,) * 2),
)  # fmt: skip
SLOS = [Slo(ttft=ttft, tpot=tpot) for ttft in (0.2, 0.35, 0.5, 0.7, 0.9) for tpot in (0.3, 0.6, 0.9)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    return write_planned(tmp_path_factory.mktemp("planned") / "tiny.jaxllm")


@pytest.fixture(scope="module", params=["stablehlo", "tflite", "tflite int8"])
def service(request, planned, tmp_path_factory):
    """Of the programs, planned by a profile of theirs."""
    subject = read_subject(planned[0], levels=(40,))
    plan = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), levels=(40,))
    engine = exported(request.param, subject, tmp_path_factory.mktemp("programs") / "tiny-lm", plan)
    return ProgramService(engine, measure_coarsely(engine))


@pytest.fixture(scope="module")
def live_planner(planned):
    with pytest.MonkeyPatch.context() as patch:
        # Its larger matrices are at 8 bits.
        patch.setattr(live_tiny_lm, "_LARGE", 1 << 16)
        return TinyPlanner(planned[1], (40, FULL_LEVEL))


def prompts():
    tokenizer = Tokenizer(tiny_tokenizer())
    for count in (3, 9, 16):
        user = " ".join(WORDS[:count])
        yield prompt_tokens(tokenizer, TaskExample(user=user, answer="", system="say it"))


def test_levels_and_kept_tokens_are_those_of_the_live_service(service, live_planner):
    """Both plan by one profile."""
    ours = service.planner._proposer
    kinds = set()
    mine, theirs = (Planner(PROFILE, (40, FULL_LEVEL), each) for each in (ours, live_planner))
    for prompt in prompts():
        # Live activations have 8 bits in products of large matrices, too.
        np.testing.assert_allclose(ours.scores(prompt), live_planner.scores(prompt), atol=5e-3)
        for slo in SLOS:
            asked = {"answer_tokens": 8}
            found, wanted = (each.plan(prompt, slo, **asked) for each in (mine, theirs))
            assert (found.level, found.prompt_ratio) == (wanted.level, wanted.prompt_ratio)
            assert found.kept.tolist() == wanted.kept.tolist()
            kinds.add((found.source, found.prompt_ratio < 1))
    assert ("proposed", True) in kinds
    answer = service.call(" ".join(WORDS[:5]), slo=SLOS[0], max_tokens=4).result()
    assert answer.plan.source in ("proposed", "fallback", "nearest")


def test_a_manifest_with_a_tiny_lm_and_no_programs_of_it_is_refused(service):
    manifest = service.engine.model.executor.manifest
    bare = tuple(each for each in manifest.signatures if each.kind != "tiny_lm")
    with pytest.raises(ConfigError, match="a tiny LM, or programs of one, but not both"):
        dataclasses.replace(manifest, signatures=bare)
    shorter = tuple(each for each in manifest.signatures if (each.kind, each.tokens) != ("tiny_lm", 64))
    with pytest.raises(ConfigError, match="reads its rows of 64 tokens"):
        dataclasses.replace(manifest, signatures=shorter)
