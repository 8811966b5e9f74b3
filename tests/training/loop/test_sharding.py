"""Steps over stacked layers on 8 host devices: losses of any mesh, a resume on another, gathered bytes and
memory of the compiled program."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from tests.training.jobs import SMOKE

MODEL = ModelConfig(
    model_type="llama", vocab_size=288, hidden_size=64, layers=4, heads=4, kv_heads=2, head_dim=16,
    ffn_size=128, window_tokens=64, norm_eps=1e-5, tied_head=False, rope=RopeConfig(dim=16, theta=1e4),
)  # fmt: skip
RECIPE = dataclasses.replace(
    SMOKE, model=MODEL, batch=8, row_tokens=64, steps=4, checkpoint_steps=2, log_steps=1, remat="full"
)
MESHES = ("data=8", "fsdp=8", "tensor=2,fsdp=4")

LOSSES = """
import dataclasses, json, sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 8)
from tests.training.loop.test_sharding import MESHES, RECIPE
from tests.training.jobs import DOCUMENTS, held_out_of
from jaxllm.training.data.packing import PackedBatches
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer, train
from jaxllm.training.pretrain.job import pretrain_job

def run(mesh, folder, recipe):
    seen = []
    batches = PackedBatches(DOCUMENTS, (), recipe.row_tokens, recipe.batch, recipe.seed)
    mesh = make_mesh(MeshShape.parse(mesh), recipe.batch)
    trainer = Trainer(pretrain_job(recipe), recipe, mesh, stack=True)
    state = train(trainer, batches.batch_at, held_out_of(recipe), Path(folder), seen.append)
    assert "stacks.0.attn.q" in state.params
    return [[each.step, each.loss, each.gradient_norm, each.held_out_loss or 0.0] for each in seen]

folder = Path(sys.argv[1])
found = {mesh: run(mesh, folder / str(number), RECIPE) for number, mesh in enumerate(MESHES)}
run("fsdp=8", folder / "resumed", dataclasses.replace(RECIPE, steps=2))
found["resumed"] = run("data=2,fsdp=2,tensor=2", folder / "resumed", RECIPE)
print(json.dumps(found))
"""

COMPILED = """
import dataclasses, json, os
# Native attention is divided by hand, which would hide what XLA's partitioner makes of everything else.
os.environ["JAXLLM_KERNELS"] = "xla"
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import NamedSharding, PartitionSpec
import jax.numpy as jnp
from tests.training.loop.test_sharding import RECIPE
from jaxllm.training.data.packing import Batch
from jaxllm.training.loop.parallel import ROWS, MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.job import pretrain_job

recipe = dataclasses.replace(RECIPE, batch=64)
mesh = make_mesh(MeshShape(data=1, fsdp=8), recipe.batch)
trainer = Trainer(pretrain_job(recipe), recipe, mesh, stack=True)
rows = NamedSharding(mesh, PartitionSpec(None, *ROWS))
kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32)
batch = Batch(*(jax.ShapeDtypeStruct((1, 64, 64), kind, sharding=rows) for kind in kinds))
compiled = trainer.lower(None, batch).compile()
print(json.dumps({"text": compiled.as_text(), "temporary": compiled.memory_analysis().temp_size_in_bytes}))
"""


def output_of(script, *arguments):
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
def test_losses_are_equal_on_any_mesh_and_across_a_resume_on_another(tmp_path):
    found = output_of(LOSSES, tmp_path)
    first = np.array(found[MESHES[0]])
    assert first[-1, 1] < first[0, 1]
    for mesh in MESHES[1:]:
        np.testing.assert_allclose(found[mesh], first, rtol=1e-4)
    np.testing.assert_allclose(found["resumed"], first[2:], rtol=1e-4)


def gathered_shapes(text):
    """Shapes of all results of all-gathers in a compiled program."""
    lines = re.findall(r"= (\(?.*?\)?) all-gather(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


@pytest.mark.slow
def test_fsdp_gathers_parameters_and_never_the_batch():
    found = output_of(COMPILED)
    shapes = gathered_shapes(found["text"])
    assert shapes
    # Float activations of the whole batch would have 64 rows of 64 tokens, or 64 · 64 of them.
    activations = [shape for shape in shapes if math.prod(shape) >= 64 * 64 * MODEL.hidden_size]
    assert not activations
    # A layer's weights, the embedding and the head, each at most a few times, and in the loop once for all.
    layer = 4 * MODEL.hidden_size * (MODEL.ffn_size * 3 + 2 * 64 + 2 * 32)
    ends = 2 * 4 * MODEL.vocab_size * MODEL.hidden_size
    assert sum(4 * math.prod(shape) for shape in shapes) < 4 * (layer + ends)
    # One device's share of the rows: of every activation that a layer makes 1/8.
    whole = 64 * 64 * 4 * (MODEL.ffn_size * 3 + MODEL.hidden_size * 8 + MODEL.vocab_size * 3)
    assert found["temporary"] < whole / 8 * 2 + 4 * (layer + ends)


READ = """
import json, sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from tests.tiny import write_tiny_folder
from jaxllm.training.loop import parallel as placing
from jaxllm.training.loop.frozen_model import FrozenModel
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.elastic.importance import measure
from tests.training.elastic import test_importance
from jaxllm.training.elastic import importance
importance.LEAST_TOKENS = 16

folder = write_tiny_folder(Path(sys.argv[1]))
alone = FrozenModel.read(folder)
mesh = make_mesh(MeshShape.parse("fsdp=4,tensor=2"), 8)
found = {}
for stack in (False, True):
    placing.stacks_layers = lambda mesh, stack=stack: stack
    for weights in ("f32", "bf16"):
        model = FrozenModel.read_onto(mesh, folder, weights)
        params = model.params
        assert any(name.startswith("stacks.") for name in params) == stack
        embedding = params["embed.tokens"]
        divided = embedding.sharding.shard_shape(embedding.shape) != embedding.shape
        difference = np.abs(np.asarray(embedding, np.float32) - alone.params["embed.tokens"]).max()
        told = [str(embedding.dtype), divided, model.fingerprint(), float(difference)]
        found[f"{stack} {weights}"] = told
    cfg = alone.cfg
    ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (8, 17)).astype(np.int32)
    nothing = np.zeros((8, 16), np.int32)
    batch = test_importance.Batch(ids[:, :-1], ids[:, 1:], nothing, np.ones((8, 16), np.float32), nothing)
    measured = measure(cfg, alone.params, [batch], mesh=mesh)
    single = measure(cfg, alone.params, [batch])
    for one, other in zip(jax.tree.leaves(vars(measured)), jax.tree.leaves(vars(single)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_folder_is_read_onto_a_mesh_and_its_importance_measured_there(tmp_path):
    found = output_of(READ, tmp_path / "tiny")
    assert len({digest for *_, digest, _ in found.values()}) == 2
    for kind, (dtype, divided, _, difference) in found.items():
        assert divided
        assert dtype == {"f32": "float32", "bf16": "bfloat16"}[kind.split()[1]]
        assert difference < (0.05 if dtype == "bfloat16" else 1e-7)
