"""Ways to quantize activations, the simulated phone, and layers without a shadow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.harness.bench import Run
from benchmarks.harness.report import OURS
from benchmarks.int8_prefill import QUANTIZERS, Plan
from benchmarks.int8_prefill.accuracy import CLIPPED, WIDE, pruned_calibrations
from benchmarks.int8_prefill.activation_quantizers import PER_TENSOR, rule_of
from benchmarks.int8_prefill.run import (
    CHUNK_TOKENS,
    MODEL,
    headline_phone,
    run,
    shadowed_layers,
    simulated_rows,
    stated_phone,
)
from jaxllm.int8_prefill.calibration import channel_tops, largest_of
from jaxllm.int8_prefill.fitting import product_weights
from jaxllm.int8_prefill.recipe import ORDERS
from jaxllm.int8_prefill.reference import scores_by_rule
from jaxllm.int8_prefill.schedule import PROCESSORS, lower_bound_ms, prompt_subgraphs, simulate
from tests.int8_prefill.calibrated import calibrated, outlying, stored, texts
from tests.tiny import TINY, write_tiny_bundle

ROW = texts()[0]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """How far each way's log-probabilities are off on the model with outliers."""
    floats = {name: jnp.asarray(each) for name, each in outlying().items()}
    look = jax.jit(lambda params, row: channel_tops(params, row, cfg=TINY))
    tops = largest_of([jax.device_get(look(floats, row)) for row in texts()])
    known, found = None, {}
    for name in QUANTIZERS:
        weights = stored()
        if name == PER_TENSOR:
            shared = product_weights(TINY, outlying(), per_tensor=True)
            weights = {**weights, **jax.tree.map(jnp.asarray, shared)}
        taken, make = rule_of(name, TINY, floats, weights, tops, calibrated(shadows=2), texts())
        run = jax.jit(
            lambda params, taken, row, make=make: scores_by_rule(
                params, row[:-1], row[1:], make(taken), cfg=TINY
            )
        )
        scores = np.asarray(run(floats, taken, ROW))
        known = scores if known is None else known
        found[name] = float(np.abs(scores - known).mean())
    return found


def test_ways_differ_as_they_should(errors):
    """With outliers: one step per tensor is far off, and nothing is nearer than floats."""
    assert errors["float"] == 0
    others = [error for name, error in errors.items() if name != "float"]
    assert len(set(others)) == len(others)
    assert min(others) > 0
    assert errors["naive-int8"] > 3 * errors[OURS]
    assert errors[PER_TENSOR] > errors[OURS]
    assert errors["SmoothQuant"] > errors["SmoothQuant-all"]
    assert errors["LLM.int8()"] < errors["naive-int8"]
    assert errors["Hadamard"] < errors["naive-int8"]


def test_the_simulated_phone_is_what_the_paper_states():
    """Section 3.4 of the paper: 315 ms on the NPU for 256 tokens, about twice what the CPU takes; and section
    2.2: products of 8 bits 4.5 to 5.8 times as fast."""
    phone = stated_phone()
    times, chunk = phone.times(MODEL, CHUNK_TOKENS), prompt_subgraphs(1, shadowed_layers())
    spent = {each: sum(times(one) for one in chunk if one.processor == each) for each in PROCESSORS}
    assert spent == pytest.approx({"integer": 315, "float": 157.5})
    assert 4.5 <= phone.integer_gops / phone.float_gflops <= 5.8
    assert sum(shadowed_layers()) == round(0.15 * MODEL.layers)
    # Attention grows with the prompt; all else that the CPU does grows with the chunks.
    (late,) = (each for each in prompt_subgraphs(4, [False]) if each.chunk == 3 and each.stage == "attend")
    (early,) = (each for each in prompt_subgraphs(1, [False]) if each.stage == "attend")
    assert 1 < times(late) / times(early) < 3
    # A faster phone of the same proportions reaches the headline: 1,024 tokens in 1,024 ms.
    times = headline_phone().times(MODEL, CHUNK_TOKENS)
    assert simulate(prompt_subgraphs(4, shadowed_layers()), times).makespan_ms == pytest.approx(1024)


def test_the_order_matters_on_the_simulated_phone():
    """By as much as section 4.6 says of 512 tokens, with bubbles as in section 3.4; none is as fast as the
    paper's headline, because the NPU's time is not."""
    rows = simulated_rows(Plan().simulated_tokens)
    ours = {row.case: row for row in rows if row.system == OURS and row.baseline == f"{OURS}-in-order"}
    gains = {case.split(", ")[-1]: 1 - 1 / (row.ratio or 1) for case, row in ours.items()}
    assert list(gains) == ["256 tokens", "512 tokens", "1024 tokens"]
    assert gains["256 tokens"] == pytest.approx(0)
    assert 0.18 < gains["512 tokens"] < 0.44
    subgraphs, times = prompt_subgraphs(2, shadowed_layers()), stated_phone().times(MODEL, CHUNK_TOKENS)
    found = {order: simulate(subgraphs, times, order) for order in ORDERS}
    assert found["in-order"].idle_share == pytest.approx(0.37, abs=0.04)
    assert found["out-of-order"].makespan_ms < 0.95 * found["first-ready"].makespan_ms
    assert found["out-of-order"].makespan_ms < 1.1 * lower_bound_ms(subgraphs, times)
    assert all(
        round(1000 * 256 / 315) >= float((row.note or "").split("; ")[1].split(" ")[0])
        for case, row in ours.items()
        if "315 ms" in case
    )
    # 256 tokens as two chunks or more are a third shorter than as one, which no order can help.
    (chosen,) = (
        row
        for row in rows
        if row.system == OURS and row.baseline == f"{OURS}-chosen-chunks" and "315 ms" in row.case
        if row.case.endswith("256 tokens")
    )
    assert chosen.ratio == pytest.approx(1 - 0.33, abs=0.02)


def test_layers_without_a_shadow_clip_all_or_none_or_as_calibration_chooses():
    floats = {name: jnp.asarray(each) for name, each in outlying().items()}
    found = list(pruned_calibrations(TINY, floats, list(texts())))
    assert [list(each) for each in found] == [[OURS, WIDE, CLIPPED]] * TINY.layers + [[OURS]]
    (wide,), (clipping,) = (found[0][name][0].steps for name in (WIDE, CLIPPED))
    assert (clipping <= wide).all()
    assert (clipping < wide).any(axis=1).all()
    for shadows, by_system in enumerate(found):
        for name, (calibration, clipped) in by_system.items():
            own = np.array(calibration.shadowed)
            assert own.sum() == shadows
            (steps,) = calibration.steps
            clips = (steps == clipping).all(axis=1)
            np.testing.assert_array_equal(steps, np.where(clips[:, None], clipping, wide))
            assert clips[own].all()
            assert clipped == clips[~own].sum()
            if name != OURS:
                assert clipped == (name == CLIPPED) * (TINY.layers - shadows)


def test_the_part(tmp_path):
    """From no shadow to one in each layer, beside floats, which outliers do not change."""
    cfg = dataclasses.replace(TINY, layers=1, attention_windows=())
    path = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg)
    plan = Plan(parts=("pruning",), rows=1, outliers=(True,))
    rows = run(Run(plan=plan, model=path))
    by_case = {case: {row.system for row in rows if row.case == case} for case in (row.case for row in rows)}
    assert by_case == {
        "tiny, with outliers put in, shadow in 0 of 1 layers": {OURS, WIDE, CLIPPED, "float"},
        "tiny, with outliers put in, shadow in 1 of 1 layers": {OURS, "float"},
    }
    assert {row.metric for row in rows} == {"perplexity"}
    (exact,) = {row.value for row in rows if row.system == "float"}
    for row in rows:
        assert row.system == "float" or (row.note or "").startswith(f"{row.value / exact - 1:+.2%} against")
