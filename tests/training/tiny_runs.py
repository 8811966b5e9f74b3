"""Shares a tiny folder of data and recipes of a few seconds between tests of whole runs."""

import functools
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.training.elastic.tiny_lm.keep_labels import Compression, align
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.loop.parallel import MeshShape
from jaxllm.training.loop.run_files import Run
from jaxllm.training.settings import TrainSettings
from tests.tiny import VOCAB_SIZE

QUIET = Console(quiet=True)
ONE = MeshShape(data=1)


def quiet(folder: Path, data: Path | None = None) -> Run:
    """A run on one device that prints nothing."""
    return Run(folder=folder, data=data, mesh_shape=ONE, console=QUIET)


# The tiny LM's

HEAD = TrainSettings(
    steps=6, batch=4, row_tokens=48, peak_learning_rate=1e-2, warmup_steps=5, checkpoint_steps=3, log_steps=3
)
ENCODER = EncoderConfig(
    vocab_size=VOCAB_SIZE, embedding_size=18, hidden_size=24, layers=2, heads=2, ffn_size=24,
    window_tokens=48, trigram_input=True, norm="layer",
)  # fmt: skip
TLM_RECIPE = TinyLmRecipe(
    score=HEAD,
    decide=HEAD,
    encoder=ENCODER,
    shared_layers=1,
    levels=(50, 100),
    prompt_ratios=(0.5, 0.7, 1.0),
    compressions=("short.jsonl",),
    instructions=("", "Hm?"),
    tasks=("sentiment",),
    questions=24,
    used_questions=32,
    held_out_share=0.2,
)


def write_data(folder: Path) -> Path:
    """Writes 80 films' moods and 30 texts with shorter versions; returns the folder."""
    (folder / "tasks" / "sst2").mkdir(parents=True)
    records = [{"text": f"film {i} is it", "label": ("positive", "negative")[i % 2]} for i in range(80)]
    (folder / "tasks" / "sst2" / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    short = [{"text": row.text, "summaries": [row.text[:9]]} for row in syllables(120)[:30]]
    (folder / "short.jsonl").write_text("\n".join(map(json.dumps, short)))
    return folder


@functools.cache
def syllables(count):
    """Texts of syllables, of which the shorter version has those that begin with k."""
    draw = np.random.default_rng(0)
    letters = [[a + b for a in "kbmk" for b in "aeiou"][each] for each in range(20)]
    texts = [" ".join(draw.choice(letters, draw.integers(4, 10))) for _ in range(count)]
    return [align(Compression(text, " ".join(w for w in text.split() if w[0] == "k"))) for text in texts]
