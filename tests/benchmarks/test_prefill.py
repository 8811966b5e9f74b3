"""Ways to quantize activations by what they must do, and the rows of the prefill benchmark."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.cli import bench_command
from benchmarks.prefill.run import Plan, simulated_rows
from benchmarks.prefill.speed import OURS
from benchmarks.prefill.ways import PER_TENSOR, WAYS, rule_of, turned_steps
from jaxllm.prefill.calibration import channel_tops, largest_of
from jaxllm.prefill.fitting import per_tensor_weights
from jaxllm.prefill.reference import observed, scores_by_rule
from tests.prefill.calibrated import calibrated, outlying, stored, texts
from tests.tiny import TINY

ROW = texts()[0]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """How far each way's log-probabilities are off on the model with outliers."""
    floats = {name: jnp.asarray(each) for name, each in outlying().items()}
    look = jax.jit(lambda params, row: channel_tops(params, row, cfg=TINY))
    tops = largest_of([jax.device_get(look(floats, row)) for row in texts()])
    known, found = None, {}
    for name in WAYS:
        weights = stored()
        if name == PER_TENSOR:
            shared = per_tensor_weights(TINY, outlying())
            weights = {**weights, **jax.tree.map(jnp.asarray, shared)}
        taken, make = rule_of(name, TINY, floats, weights, tops, calibrated(shadows=2))
        if name == "Hadamard":

            def behind(layer, product, x, tables=taken):
                return jnp.max(jnp.abs(x @ tables[layer][product][1]), axis=0)

            seen = jax.jit(lambda params, row, look=behind: observed(params, row, look, cfg=TINY))
            taken = turned_steps(taken, largest_of([jax.device_get(seen(floats, row)) for row in texts()]))
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


def test_the_papers_phone():
    """Ours is named, beats in-order by what the paper says on long prompts, and stays near the bound."""
    rows = simulated_rows(Plan())
    ours = [row for row in rows if row.system == OURS and row.baseline == f"{OURS}-in-order"]
    assert len(ours) == 4
    gains = [1 - 1 / row.ratio for row in ours if row.ratio is not None]
    assert gains == sorted(gains)
    assert 0.18 < gains[-1] < 0.44
    for row in ours:
        assert float((row.note or "").split(" ")[0]) < 1.1


def test_the_command():
    run = CliRunner().invoke(bench_command, ["prefill", "--quick", "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.output)
    assert found["bench"] == "prefill"
    assert {row["metric"] for row in found["rows"]} == {"makespan_ms"}
    assert CliRunner().invoke(bench_command, ["prefill", "--data", "x"]).exit_code == 2
