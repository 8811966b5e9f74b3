"""Adapters as an input of programs: text equal to the live engine's, switched without another program."""

import dataclasses

import pytest

from jaxllm import Engine
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError, ContextGone, ProgramError
from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.service import ProgramService
from jaxllm.export.folder_format.parts import adapter_file
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import AdapterOptions, read_subject
from jaxllm.serving.elastic.profiling import measure_coarsely
from tests.export.models import CHUNKS, CONFIG, CONTEXT, OPTIONS, PROMPTS, exported, write_adapters

PLAN = ExportPlan(
    context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(), verify_tokens=(8,), levels=(40,)
)
NAMES = (None, "mail", "notes", "mail", None)


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
        found[name] = {level: answers(live, level) for level in (40, WHOLE)}
    assert len({str(found[name][level]) for name in found for level in (40, WHOLE)}) == 6
    return found


@pytest.fixture(scope="module", params=["stablehlo", "tflite"])
def engine(request, elastic, given, tmp_path_factory):
    """Of a bundle whose level 40 has an adapter of its own."""
    subject = read_subject(elastic, levels=(40,), inputs=AdapterOptions(given=given))
    return exported(request.param, subject, tmp_path_factory.mktemp("programs") / "adapters", PLAN)


def answers(engine, level):
    return [engine.stream(each, CONFIG, level=level).result().tokens for each in PROMPTS[:4]]


def test_text_is_the_live_engines_with_each_adapter_and_none(engine, wanted, compiles):
    with compiles() as count:
        for name in NAMES:
            engine.set_adapter(name)
            for level in (40, WHOLE):
                assert answers(engine, level) == wanted[name][level], (name, level)
        assert count() == 0


def test_adapters_of_other_names_and_sizes_are_refused(engine):
    with pytest.raises(ConfigError, match="no adapter 'other', but mail, notes; export the model"):
        engine.set_adapter("other")
    inputs = engine.model.executor.manifest.adapters
    with pytest.raises(ProgramError, match=f"{adapter_file('mail')} has 4 bytes, not"):
        inputs.parsed("mail", bytes(4))


def test_a_context_keeps_its_adapter(engine, wanted, tmp_path):
    contexts = ProgramContexts(engine, tmp_path / "store", budget_bytes=1 << 20)
    service = ProgramService(engine, measure_coarsely(engine), contexts=contexts)
    context = service.new_context("app", adapter="notes")
    answer = context.answer(PROMPTS[2], CONFIG).result()
    assert answer.tokens == wanted["notes"][WHOLE][2]
    # Calls without a context have none.
    assert answers(engine, WHOLE) == wanted[None][WHOLE]
    again = service.context("app", context.name)
    assert again.adapter == "notes"
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
