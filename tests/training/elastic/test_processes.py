"""Adapters and elastic models by a group of two processes: the results of one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.bundle import Bundle
from jaxllm.training.calibration import BundleOutput
from jaxllm.training.elastic import importance
from jaxllm.training.elastic.run import elasticize
from jaxllm.training.loop.parallel import MeshShape
from jaxllm.training.lora.run import LoraRecipe, train_lora
from tests.training.elastic.test_run import RECIPE
from tests.training.processes import join, started_group, told_by
from tests.training.tiny_runs import quiet

pytestmark = [pytest.mark.slow]

SHORT = {"steps": 2, "warmup_steps": 0, "checkpoint_steps": 2, "log_steps": 2}
TOGETHER = dataclasses.replace(RECIPE, **SHORT, recovery="joint", units="global", whole_kl_nats=1.0)
LORA = LoraRecipe(
    **SHORT, batch=2, row_tokens=128, peak_learning_rate=1e-2, sources=RECIPE.sources, held_out_share=0.1
)


def both(model, data, folder, mesh):
    """The losses of an adapter and of levels."""
    run = dataclasses.replace(quiet(folder, data), mesh_shape=MeshShape.parse(mesh))
    adapter = train_lora(LORA, model, run.stage("lora"))
    summary = json.loads((adapter.parent / "summary.json").read_text())
    facts = elasticize(TOGETHER, model, BundleOutput(folder / "out.jaxllm"), run.stage("run"))
    return [*summary["held_out"].values(), *(each["held_out"] for each in facts["levels"].values())]


def main(model, data, folder, port, process):
    """One process of two."""
    join(port, process, 1)
    importance.LEAST_TOKENS = 64
    print(json.dumps(both(Path(model), Path(data), Path(folder), "data=1,fsdp=2")))


def test_two_processes_have_the_results_of_one(model, data, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("group", "alone")]
    for folder in folders:
        folder.mkdir()
    group = started_group("tests.training.elastic.test_processes", model, data, folders[0])
    monkeypatch.setattr(importance, "LEAST_TOKENS", 64)
    wanted = both(model, data, folders[1], "data=1")
    for process in group:
        np.testing.assert_allclose(told_by(process), wanted, rtol=2e-3)
    bundles = [Bundle.open(folder / "out.jaxllm").load() for folder in folders]
    for name, value in bundles[0].items():
        np.testing.assert_allclose(value, bundles[1][name], atol=5e-2, err_msg=name)
    assert (folders[0] / "lora" / "adapter" / "adapter_config.json").exists()
