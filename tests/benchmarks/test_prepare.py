"""`jaxllm bench prepare`: its rows, on a tiny model with a vocabulary of byte pairs."""

import dataclasses
import json

import pytest

from benchmarks.harness.bench import Run
from benchmarks.models import shape
from benchmarks.peers import PEERS
from benchmarks.peers.llama import PACKAGE_TYPES, gguf_of
from benchmarks.peers.peer import missing_packages
from benchmarks.prepare import run
from benchmarks.prepare.run import FROM_FLOATS, Plan, byte_pairs, vocabulary_keys
from benchmarks.samples import stories_file
from jaxllm.bundle import Bundle
from jaxllm.checkpoints.gguf_file import read_gguf
from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer
from jaxllm.prepare import prepare
from jaxllm.text.tokenizer import Tokenizer

pytest.importorskip("gguf")


SHAPE = shape(D=64, L=2, N=4, K=2, H=16, F=96, V=2048, tied_head=True, window_tokens=64)
PLAN = Plan(
    kinds=("Q4_0",), prompt_tokens=(16,), decode_tokens=4, rounds=1, context_tokens=64, patience_s=0,
    threads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(run.SHAPES, "0.5b-128k", SHAPE)


def source(told=None):
    listen = (lambda _: None) if told is None else told.append
    return run.random_source("0.5b-128k", SHAPE, Run(plan=PLAN, tell=listen))


@pytest.mark.slow
def test_files_are_prepared_timed_and_scored(tmp_path):
    """All parts of one file. Memory: of the file and of the floats at as many bits, beside 1.2 files and a
    layer. Speed: both bundles. Perplexity of random weights: the same to what 4 bits round."""
    source(told := [])
    assert told[0].startswith("2,048 byte pairs")
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little dog. " * 8)
    rows = run.run(Run(plan=dataclasses.replace(PLAN, text_windows=2, text=text), shape="0.5b-128k"))
    found = {(row.case, row.metric, row.system, row.baseline): row for row in rows}
    assert all(row.value > 0 for row in rows)
    prepared = {row.case for row in rows if row.metric == "build_ms"}
    assert prepared == {f"0.5b-128k, prepare from {each}" for each in ("GGUF Q4_0", "floats to int4-all")}
    for case in prepared:
        row = found[case, "peak_memory_bytes", "jaxllm", "1.2 files and a layer"]
        file_mb = float(row.note.split("the file has ")[1].split(" MB")[0])
        assert 1.2 * (file_mb - 1) < row.ratio * row.value / 1e6 < 1.2 * (file_mb + 1) + 1
        assert (case, "file_bytes", "jaxllm", None) in found
    for case, metric in (("prompt 16", "prefill_tokens_per_s"), ("decode 4 after 16", "decode_tokens_per_s")):
        ours = found[f"0.5b-128k Q4_0, {case}", metric, "jaxllm", FROM_FLOATS]
        floats = found[ours.case, metric, FROM_FLOATS, None]
        assert ours.ratio == pytest.approx(ours.value / floats.value)
        # As many bits.
        assert (ours.note, "4.5" in ours.note) == (floats.note, True)
    values = {row.system: row.value for row in rows if row.metric == "perplexity"}
    llama = [] if missing_packages(*PEERS["llama.cpp"].packages) else ["llama.cpp"]
    assert set(values) == {"jaxllm", FROM_FLOATS, "float", *llama}
    assert all(value == pytest.approx(values["float"], rel=0.15) for value in values.values())


def test_byte_pairs_are_learned_and_filled_up_and_the_same_in_a_gguf_file(tmp_path):
    told = []
    folder, vocabulary = source(told)
    files, learned = byte_pairs(20_000, [stories_file(None)])
    assert 256 < learned < len(json.loads(files.tokenizer_json)["model"]["vocab"]) == 20_000
    how = {"by_package": PACKAGE_TYPES, "vocabulary": vocabulary}
    path = gguf_of(folder, "Q4_0", threads=1, progress=lambda *_: None, **how)
    read = Tokenizer(read_gguf_tokenizer(read_gguf(path), SHAPE.vocab_size))
    prepare(folder, tmp_path / "m.jaxllm")
    with Bundle.open(tmp_path / "m.jaxllm") as bundle:
        ours = Tokenizer(bundle.tokenizer_files())
    assert read.same_tokens(ours)
    sample = "Lily's 2 dogs ran — fast!\n"
    assert read.encode(sample) == ours.encode(sample)
    assert ours.decode(ours.encode(sample)) == sample
    assert len(vocabulary_keys(files)["tokens"]) == 20_000
