"""Teaches the packaged draft model a formula by a low-rank adapter, and puts it on a running engine.

python examples/train_lora.py
"""

import subprocess
import tempfile
from pathlib import Path

import jaxllm
from jaxllm import Engine, EngineOptions, GenerationConfig

RECIPE = """
steps = 40
batch = 8
row_tokens = 64
peak_learning_rate = 1e-2
warmup_steps = 4
checkpoint_steps = 20
lora = {rank = 8, alpha = 16.0}
sources = [{text = "songs.txt"}]
"""
ANIMALS = ("cat", "dog", "bird", "fish", "frog", "duck", "cow", "pig", "hen", "fox", "bear", "owl", "bee")
MODEL = Path(jaxllm.__file__).parent / "assets" / "draft.jaxllm"

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    lines = [f"The {animal} sang: moon, moon, silver moon, good night." for animal in ANIMALS]
    (folder / "songs.txt").write_text("\n\n".join(lines * 8), encoding="utf-8")
    (folder / "songs.toml").write_text(RECIPE, encoding="utf-8")
    command = ["jaxllm", "lora", MODEL, "--recipe", folder / "songs.toml"]
    subprocess.run([*command, "--data", folder, "--run", folder / "run"], check=True)

    engine = Engine.open(MODEL, options=EngineOptions(adapter_rank=8))
    for adapter in (None, folder / "run" / "adapter"):  # swapped between answers, nothing is compiled
        engine.set_adapter(adapter)
        print(
            adapter and adapter.name, engine.generate("The horse sang:", GenerationConfig(max_tokens=16)).text
        )
