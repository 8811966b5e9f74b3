"""`jaxllm bench engine`: its rows, its peers, and what it refuses."""

import contextlib
import dataclasses
import math

import numpy as np
import pytest

from benchmarks.engine import run as bench
from benchmarks.engine.run import OURS, PER_TOKEN, Plan
from benchmarks.harness.bench import Run
from benchmarks.peers import PEERS
from jaxllm import Engine, EngineOptions
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.serving.evaluation.texts import perplexity
from tests.tiny import TINY, tiny_params, write_tiny_bundle, write_tiny_folder

OPTIONS = EngineOptions(context_tokens=64, chunk_tokens=(16,), cache_tokens=(64,), decode_block=8)
PLAN = Plan(
    prompt_tokens=(16, 32), decode_tokens=12, rounds=2, patience_s=0.0, threads=1, context_tokens=64, peers=()
)
TEXT = "the hello tell " * 12
CFG = dataclasses.replace(TINY, ffn_size=96)


@pytest.fixture(autouse=True, scope="module")
def known_bandwidth():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "memory_probe", lambda threads: contextlib.nullcontext(lambda: 1e9))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("bench") / "tiny", cfg=CFG, params=tiny_params(CFG))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = write_tiny_bundle(tmp_path_factory.mktemp("bench") / "tiny.jaxllm", weights="int8")
    return bench.run(Run(plan=PLAN, model=path))


def test_rows_of_a_run_alone(alone):
    """Load, build and run apart; rates agree with times, and the share of the bandwidth with the bytes of a
    token; decoding stands beside one token per dispatch."""
    assert {row.metric for row in alone} == {
        "load_ms", "build_ms", "buckets", "ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s",
        "weight_bytes", "bits_per_weight", "bandwidth_share", "peak_memory_bytes", "read_bandwidth",
    } | ({"kernel_share"} if native.kernels().native else set())  # fmt: skip
    assert all(row.value > 0 for row in alone)
    found = {(row.case, row.metric, row.system): row for row in alone}
    weights = found["tiny int8", "weight_bytes", OURS].value
    for tokens in (16, 32):
        case = f"tiny int8, prompt {tokens}"
        rate, spent = (found[case, metric, OURS].value for metric in ("prefill_tokens_per_s", "ttft_ms"))
        assert rate == pytest.approx(1000 * tokens / spent)
        case = f"tiny int8, decode 12 after {tokens}"
        ours, plain = (found[case, "decode_tokens_per_s", system] for system in (OURS, PER_TOKEN))
        assert (ours.baseline, ours.ratio) == (PER_TOKEN, pytest.approx(ours.value / plain.value))
        assert (plain.baseline, plain.ratio) == (None, None)
        # The tiny model's head is its own: of the embedding table a token reads one row.
        step_bytes = found[case, "bandwidth_share", OURS].value * 1e9 / ours.value
        assert 0.4 * weights < step_bytes < weights


@pytest.fixture(scope="module")
def beside(folder, tmp_path_factory):
    """Two widths, all peers that are installed, and a text."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(TEXT)
    asked = {"weights": ("f32", "int8"), "peers": ("all",), "text": text}
    plan = dataclasses.replace(PLAN, prompt_tokens=(16,), rounds=1, **asked)
    return bench.run(Run(plan=plan, model=folder))


@pytest.mark.campaign
def test_perplexity_is_that_of_eval_and_peers_agree(beside, folder):
    rows = [r for r in beside if r.metric == "perplexity"]
    assert {r.case.split(",")[0] for r in rows} == {"tiny f32", "tiny int8"}
    for width in ("f32", "int8"):
        engine = Engine.open(folder, weights=width, options=OPTIONS, warm_up=False)
        expected = perplexity(engine, [TEXT])
        mine = [r for r in rows if r.case == f"tiny {width}, text.txt, {expected.tokens} tokens"]
        (value,) = {r.value for r in mine if r.system == OURS}
        assert value == pytest.approx(expected.perplexity, rel=1e-6)
        # Lower is better: the ratio is how many times ours is lower.
        for row in mine:
            if row.baseline:
                (theirs,) = (r.value for r in mine if r.system == row.baseline)
                assert row.ratio == pytest.approx(theirs / row.value)
    floats = {r.value for r in rows if r.system == "float"}
    assert len(floats) == 1
    for row in rows:
        assert (row.note is None) == (row.system == "float")
        assert math.log(row.value) == pytest.approx(math.log(*floats), abs=0.05)


def test_a_loss_is_paired():
    """An equal loss of all tokens has no width, though the tokens' own losses differ."""
    floats = np.random.default_rng(0).normal(3.0, 1.0, 640)
    rows = bench.quality_rows("text", {OURS: floats + np.log(1.01), "float": floats})
    assert rows[0].note == "+1.00% against float, paired 95 % in [+1.00%, +1.00%]"
    assert rows[0].value == pytest.approx(1.01 * rows[1].value)


def test_the_plan_shrinks_to_the_context():
    plan = Plan().within(512)
    assert (plan.prompt_tokens, plan.decode_tokens) == ((64, 256, 384), 128)
    plan = Plan().within(2)
    assert (plan.prompt_tokens, plan.decode_tokens) == ((1,), 1)


def test_a_named_peer_has_to_be_there_and_others_are_named(monkeypatch):
    monkeypatch.setattr(PEERS["llama.cpp"], "packages", ("nowhere",))
    monkeypatch.setattr(PEERS["transformers"], "packages", ())
    told = []

    def peers(*wanted, plan=None):
        plan = dataclasses.replace(plan or Plan(), peers=wanted)
        return bench._peers(TINY, Run(plan=plan, tell=told.append))

    assert peers("all") == ["transformers"]
    assert "nowhere is not installed" in told[0]
    with pytest.raises(ConfigError, match=r"peer llama.cpp: nowhere is not installed: .*jaxllm\[peers\]"):
        peers("llama.cpp")
    assert peers() == []
    # A quick run leaves slow peers out unless they are named.
    monkeypatch.setattr(PEERS["llama.cpp"], "packages", ())
    assert peers("all", plan=Plan.quick()) == ["llama.cpp"]
    assert "--peer transformers" in told[1]
    assert peers("transformers", plan=Plan.quick()) == ["transformers"]


def test_what_cannot_be_measured_is_refused(tmp_path, folder):
    many = dataclasses.replace(PLAN, threads=10**6)
    with pytest.raises(ConfigError, match="--threads must be in"):
        bench.run(Run(plan=many, model=folder))
    with pytest.raises(ConfigError, match="trained model"):
        bench.run(Run(plan=dataclasses.replace(PLAN, text=tmp_path / "t"), shape="15m"))
