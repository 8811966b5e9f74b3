"""Encoder-decoders as programs: what they answer, with drafts too, and what a format refuses."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import open_device
from jaxllm.export.programs.model import open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.stablehlo import export_stablehlo
from jaxllm.export.subject import read_subject
from jaxllm.models.architectures import architecture
from jaxllm.models.features import require_feature
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests import tiny, tiny_encdec
from tests.export.models import with_drafts
from tests.tiny_variants import ENCODER_DECODERS

pytest.importorskip("flatbuffers")

CONTEXT = 48
# All kinds of programs of one family; of the others those that every answer takes.
FULL = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(16,), verify_tokens=(8,), cache_tokens=(16,))
LEAST = ExportPlan(context_tokens=CONTEXT, chunk_tokens=(16,), cache_tokens=())
OPTIONS = EngineOptions(context_tokens=CONTEXT, chunk_tokens=(16,), buckets_bytes=0)
GREEDY = GenerationConfig(max_tokens=20, ignore_eos=True, sampling=Sampling(temperature=0))
# Shorter than the first source bucket, longer, and one that repeats itself.
SOURCES = ["hello", "zzzz 12345 hello the zzzz 54321", "the the the the the the"]


def config(family):
    """The config of a tiny encoder-decoder with the tiny tokenizer's vocabulary."""
    if family == "t5":
        return tiny_encdec.TINY_T5
    keys = {**ENCODER_DECODERS[family][1], "vocab_size": tiny.VOCAB_SIZE, "model_type": family}
    return architecture(family).config_from_hf(keys)


@pytest.fixture(scope="module", params=["t5", "bart", "switch_transformers"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def bundle(family, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / f"{family}.jaxllm"
    return tiny_encdec.write_bundle(path, cfg=config(family))


@pytest.fixture(scope="module")
def live(bundle):
    """The live engine's answers."""
    engine = Engine.open(bundle, options=OPTIONS)
    found = [engine.generate(each, GREEDY).tokens for each in SOURCES]
    engine.close()
    assert len(set(map(tuple, found))) == len(found)
    return found


@pytest.fixture(scope="module")
def stablehlo(bundle, family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs") / "stablehlo"
    export_stablehlo(read_subject(bundle), folder, FULL if family == "t5" else LEAST, platforms=("cpu",))
    return folder


def answers(engine):
    return [engine.generate(each, GREEDY).tokens for each in SOURCES]


def test_stablehlo_answers_as_the_live_engine(stablehlo, live):
    engine = open_program(stablehlo)
    assert answers(engine) == live
    # Answers that run together keep their own sources.
    both = [engine.stream(each, GREEDY) for each in SOURCES[:2]]
    for _ in zip(*both, strict=False):
        pass
    assert [each.result().tokens for each in both] == live[:2]
    with pytest.raises(ContextOverflow, match="the source has 60 tokens, and the encoder reads at most"):
        engine.generate([5] * 60, GREEDY)
    with pytest.raises(ConfigError, match="scoring or embedding text: not for encoder-decoders"):
        engine.runner.score([1, 2], [2, 3])


def test_drafts_read_the_source(stablehlo, family, live):
    if family != "t5":
        pytest.skip("drafts are the same in all families")
    plain = open_program(stablehlo)
    for options in ({"drafter": "ngram"}, {"model": stablehlo}):
        engine = with_drafts(plain, **options)
        assert answers(engine) == live
        assert engine.speculation.counts.accepted > 0


def test_tflite_answers_as_the_live_engine(bundle, family, live, tmp_path):
    pytest.importorskip("litert_converter")
    from jaxllm.export.tflite import export_tflite

    subject = read_subject(bundle)
    if family == "switch_transformers":
        with pytest.raises(ConfigError, match="no mixture of experts"):
            require_feature(subject.cfg, "tflite")
        return
    plan = dataclasses.replace(FULL, block_tokens=4, cache_tokens=()) if family == "t5" else LEAST
    export_tflite(subject, tmp_path / "f32", plan)
    drafts = SpeculationOptions(drafter="ngram") if plan.verify_tokens else None
    engine = open_device(tmp_path / "f32", threads=1, drafts=drafts)
    assert answers(engine) == live
    with pytest.raises(ConfigError, match="contexts of programs: not for encoder-decoders"):
        ProgramContexts(engine, tmp_path / "contexts", budget_bytes=1 << 20)
