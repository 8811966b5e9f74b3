"""A tiny folder of data, recipes of a few seconds, a small job, and processes, for tests of training."""

import copy
import dataclasses
import functools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import PackedBatches, evaluation_batches
from jaxllm.training.decoders import PretrainRecipe, pretrain_job
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.rows import align
from jaxllm.training.loop import trainer as loop
from jaxllm.training.loop.parallel import MeshShape, make_mesh
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
    return [align(text, " ".join(w for w in text.split() if w[0] == "k")) for text in texts]


SMOKE = PretrainRecipe.load("smoke")
# One layer: these tests spend their time on compilation.
SMOKE = dataclasses.replace(SMOKE, model=dataclasses.replace(SMOKE.model, layers=1, attention_windows=()))


def documents(count, first=0):
    """Documents in which each token follows from the one before."""
    lengths = 5 + (np.arange(first, first + count) * 13) % 40
    tokens = [(place + np.arange(length)) * 7 % 61 for place, length in enumerate(lengths, start=first)]
    nothing = np.zeros(count, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenizedDocuments(np.concatenate(tokens).astype(np.uint16), starts, nothing, nothing, 0)


DOCUMENTS, HELD_OUT = documents(150), documents(10, first=1000)


def one_device():
    return make_mesh(MeshShape(data=1), 1)


def held_out_of(recipe):
    return functools.partial(evaluation_batches, HELD_OUT, recipe.row_tokens, recipe.batch)


def batches_of(recipe):
    return PackedBatches(DOCUMENTS, (), recipe.row_tokens, recipe.batch, recipe.seed)


@functools.cache
def _made(recipe):
    return loop.Trainer(pretrain_job(recipe), recipe, one_device())


def trainer_of(recipe):
    """A trainer of a recipe's model on one device, which shares what others of this process have compiled."""
    # Neither of these is part of a compiled step.
    trainer = copy.copy(_made(dataclasses.replace(recipe, log_steps=1, checkpoint_steps=1)))
    trainer.settings = recipe
    return trainer


def train(recipe, folder, report=lambda progress: None, *, trainer=None):
    """Trains a recipe's model on DOCUMENTS."""
    trainer = trainer or trainer_of(recipe)
    return loop.train(trainer, batches_of(recipe).batch_at, held_out_of(recipe), folder, report)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def started(module: str, *words: object) -> subprocess.Popen:
    """A process that calls a module's `main` with words; its last line is JSON."""
    script = f"import sys; from {module} import main; main(*sys.argv[1:])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], **pipes)


def started_group(module: str, *words: object) -> list[subprocess.Popen]:
    """Two processes that call a module's `main` with words, the coordinator's port and their number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [started(module, *words, port, process) for process in range(2)]


def join(port: str, process: str, devices: int) -> None:
    """Makes the devices of one of a group's processes, and joins the other one."""
    import jax

    from jaxllm.training.loop.parallel import start_process_group

    jax.config.update("jax_num_cpu_devices", devices)
    start_process_group(f"127.0.0.1:{port}", 2, int(process))


def told_by(process: subprocess.Popen) -> Any:
    """What a process printed at its end."""
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])
