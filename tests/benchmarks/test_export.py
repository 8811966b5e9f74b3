"""Tests `jaxllm bench export`: forms of one model that must answer alike, and its rows."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.export import Plan, run
from benchmarks.export.run import (
    EDGE_QUANTIZER,
    LITERT_LM,
    LIVE,
    LLAMA_CPP,
    STABLEHLO,
    STAGES,
    STEPS,
    TFLITE,
    Export,
    agreement_rows,
    makespan_rows,
    opening_rows,
    speed_rows,
)
from benchmarks.harness.bench import Run
from benchmarks.peers import SYSTEMS, Opening
from benchmarks.peers.ours import BLOCKS, PROGRAM_BLOCKS
from benchmarks.peers.process import Result
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.stablehlo import export_stablehlo
from jaxllm.export.subject import read_subject
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import WINDOW_TOKENS, tiny_tokenizer, write_tiny_bundle

pytest.importorskip("flatbuffers")


PROMPT = [1, 50, 7, 99, 23, 5, 9]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_tiny_bundle(tmp_path_factory.mktemp("bench") / "tiny.jaxllm")


def opened(peer, model, **options):
    opening = Opening(
        peer=peer, model=model, format="f32", threads=1, context_tokens=WINDOW_TOKENS, options=options
    )
    return SYSTEMS[peer].open(opening, lambda *_: None)


@pytest.mark.slow
def test_all_forms_of_a_model_answer_alike(bundle, tmp_path):
    plan = ExportPlan(chunk_tokens=(16,))
    export_stablehlo(read_subject(bundle), tmp_path / "programs", plan, platforms=("cpu",))
    chunks = {"chunk_tokens": [16]}
    engine = opened("jaxllm", bundle, buckets_bytes=0, cache_tokens=[WINDOW_TOKENS], **chunks)
    forms = [opened("programs", tmp_path / "programs"), opened("live-steps", bundle, **chunks)]
    wanted = [engine.prefill(PROMPT, BLOCKS), *engine.decode(8, BLOCKS)]
    for form in forms:
        assert [
            form.prefill(PROMPT, PROGRAM_BLOCKS),
            *form.decode(5, PROGRAM_BLOCKS),
            *form.decode(3, PROGRAM_BLOCKS),
        ] == wanted
        assert form.facts().keys() == {"load_ms", "build_ms"}
    scores = [form.score(PROMPT[:-1], PROMPT[1:]) for form in forms]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_rows_of_speed_name_the_baseline_of_each_form():
    rates = {LIVE: 4.0, STEPS: 2.0, STABLEHLO: 1.9, TFLITE["f32"]: 3.0, TFLITE["int8"]: 6.0, LLAMA_CPP: 5.0}
    results = {
        (system, 10): Result(
            ms={"prefill": 10_000 / rate, "decode": 20_000 / rate}, kernel_ms={}, settings={},
            readable_bytes=0, disturbed=0, samples=1,
        )
        for system, rate in rates.items()
    }  # fmt: skip
    runtime = {"prefill_tokens_per_s": [7.0, 8.0, 9.0], "decode_tokens_per_s": [1.0, 2.0, 3.0]}
    plan = Plan(prompt_tokens=(10,), decode_tokens=20)
    rows = speed_rows(results, list(rates), plan, runtime)
    found = {(row.case, row.system, row.baseline): row for row in rows}
    assert found["prompt 10", STABLEHLO, STEPS].ratio == pytest.approx(0.95)
    assert found["decode 20 after 10", TFLITE["int8"], LLAMA_CPP].ratio == pytest.approx(1.2)
    assert found["decode 20 after 10", LITERT_LM, None].value == 2.0
    assert found["prompt 10", LIVE, None].value == pytest.approx(4.0)
    assert (("prompt 10", TFLITE["w8a8"], TFLITE["int8"])) not in found
    facts = {LIVE: {"load_ms": 3.0, "build_ms": 4.0}, LLAMA_CPP: {}}
    children = {
        name: SimpleNamespace(
            facts=each, open_peak_bytes=5, peak_bytes=6, settings=("x",), answer=answered(name)
        )
        for name, each in facts.items()
    }
    told = opening_rows(children, {STABLEHLO: Export(Path(), 7, 8.0)}, {"init_ms": [1.0], "peak_bytes": 9})
    found = {(row.case, row.system, row.metric): row.value for row in told}
    assert (found["export", STABLEHLO, "build_ms"], found["file", STABLEHLO, "file_bytes"]) == (8.0, 7)
    assert found["run", LITERT_LM, "peak_memory_bytes"] == 9
    assert ("open", LLAMA_CPP, "load_ms") not in found
    # Answers are those of the live engine, token by token; llama.cpp's are not compared.
    others = (STEPS, EDGE_QUANTIZER)
    children |= {name: SimpleNamespace(settings=("x",), answer=answered(name)) for name in others}
    agreed = agreement_rows(children, [[1], [2]], 3, Tokenizer(tiny_tokenizer()), None)
    assert {row.system: row.value for row in agreed} == {STEPS: 1.0, EDGE_QUANTIZER: 0.5}


def answered(name):
    return lambda prompt, tokens, setting: {"ids": [prompt[0] + (name == EDGE_QUANTIZER and prompt == [2])]}


@pytest.mark.campaign
def test_a_run(bundle):
    plan = Plan(
        prompt_tokens=(16,), decode_tokens=4, rounds=1, answers=2, answer_tokens=4, context_tokens=64,
        patience_s=0, threads=1, parts=("formats",),
    )  # fmt: skip
    told: list[str] = []
    rows = run.run(Run(plan=plan, model=bundle, tell=told.append))
    agreement = {row.system: row.value for row in rows if row.metric == "agreement"}
    assert agreement[STABLEHLO] == agreement[STEPS] == 1
    assert {row.metric for row in rows} >= {"file_bytes", "load_ms", "build_ms", "decode_tokens_per_s"}
    assert all(each.startswith("without ") for each in told)


def test_rows_of_recorded_stages_stand_beside_each_other():
    times = {"simulated_ms": 8.0, "real_to_simulated": 1.25, "chunks": "64 + 128", "real_ms": 10.0}
    whole, in_order = {"real_ms": 20.0}, {**times, "real_ms": 15.0}
    found = {64: {STAGES: times, f"{STAGES}-in-order": in_order, TFLITE["w8a8"]: whole}}
    rows = makespan_rows(found)
    spans = [(row.system, row.baseline, row.ratio) for row in rows if row.metric == "makespan_ms"]
    assert spans[:2] == [(STAGES, f"{STAGES}-in-order", 1.5), (STAGES, TFLITE["w8a8"], 2.0)]
    assert rows[0].note == "chunks of 64 + 128; +25% against simulated 8 ms"
    assert {row.system for row in rows if row.metric == "real_to_simulated"} == {STAGES, f"{STAGES}-in-order"}
