"""Runs whose checkpoints are elsewhere, interrupted and resumed."""

import dataclasses
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from jaxllm.training.loop.run_files import keep_checkpoints_at
from jaxllm.training.pretrain.run import PretrainTexts, pretrain
from tests.training.jobs import SMOKE
from tests.training.tiny_runs import ONE, SILENT


def resumed_to_the_same_bits(folder: Path, url: str) -> Path:
    """Trains two steps of four with checkpoints at `url`, then the others, and requires the parameters of an
    uninterrupted run; returns the run."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Story {n}: a cat sat on {n} mats." for n in range(400)))
    options = {"texts": PretrainTexts(train=[text]), "mesh_shape": ONE, "monitoring": SILENT}
    model = dataclasses.replace(SMOKE.model, vocab_size=288)
    recipe = dataclasses.replace(SMOKE, model=model, steps=4, checkpoint_steps=2, held_out_share=0.1)
    whole = pretrain(recipe, folder / "local", **options)
    run = folder / "run"
    keep_checkpoints_at(run, url)
    pretrain(dataclasses.replace(recipe, steps=2), run, **options)
    resumed = load_file(pretrain(recipe, run, **options) / "model.safetensors")
    assert not (run / "checkpoints").exists()
    for name, value in load_file(whole / "model.safetensors").items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    return run
