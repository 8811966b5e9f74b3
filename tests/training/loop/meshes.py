"""Trains, compiles, reads and measures on the meshes of one process with eight devices, and prints it."""

import copy
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.kernels.native import without_native_kernels
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import evaluation_batches
from jaxllm.training.elastic import importance
from jaxllm.training.experts.measures import TextPerplexity, WidthLosses
from jaxllm.training.loop import parallel
from jaxllm.training.loop.dry_run import batch_shapes
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.loop.optimizer import Matrix, orthogonal
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.pretrain.run import pretrain_job
from tests.tiny import tiny_params, write_tiny_folder
from tests.training.jobs import SMOKE, train

MODEL = ModelConfig(
    model_type="llama", vocab_size=288, hidden_size=64, layers=4, heads=4, kv_heads=2, head_dim=16,
    ffn_size=128, window_tokens=64, norm_eps=1e-5, tied_head=False, rope=RopeConfig(dim=16, theta=1e4),
)  # fmt: skip
RECIPE = dataclasses.replace(
    SMOKE, model=dataclasses.replace(MODEL, layers=2, attention_windows=()), batch=8, steps=4, remat="full"
)
# Meshes, the parts of a step, and whether layers are stacked. The first is one device.
MESHES = (
    ("data=1", 1, False), ("", 1, True), ("fsdp=8", 1, True), ("tensor=2,fsdp=4", 1, True),
    ("fsdp=4,tensor=2", 2, False),
)  # fmt: skip
# A square, a wide and a tall matrix, experts, and heads on two axes.
SHAPES = {"q": (32, 4, 8), "wide": (16, 48), "tall": (48, 16), "experts": (3, 16, 48), "o": (4, 8, 32)}
MATRICES = {
    "q": Matrix((), (0,), (1, 2)), "wide": Matrix((), (0,), (1,)), "tall": Matrix((), (0,), (1,)),
    "experts": Matrix((0,), (1,), (2,)), "o": Matrix((), (0, 1), (2,)),
}  # fmt: skip


def gradients(seed):
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def views(arrays):
    return {name: MATRICES[name].view(value) for name, value in arrays.items()}


def trainer_on(mesh, parts, stack, recipe=RECIPE):
    recipe = dataclasses.replace(recipe, accumulate=parts)
    mesh = make_mesh(MeshShape.parse(mesh), recipe.batch // parts)
    return Trainer(pretrain_job(recipe), recipe, mesh, stack=stack)


def losses(folder, trainer):
    """Whether parameters are divided, and the measures of each step."""
    seen = []
    params = train(trainer.settings, folder, seen.append, trainer=trainer).params
    assert ("stacks.0.attn.q" in params) == trainer.stack
    divided = any(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in params.values())
    return divided, [[each.step, each.loss, each.gradient_norm, each.held_out_loss or 0.0] for each in seen]


def all_losses(folder):
    found, first = [], None
    for number, (mesh, parts, stack) in enumerate(MESHES):
        trainer = trainer_on(mesh, parts, stack)
        found.append(losses(folder / str(number), trainer))
        first = trainer if mesh == "fsdp=8" else first
    stopped = copy.copy(first)
    stopped.settings = dataclasses.replace(RECIPE, steps=2)
    losses(folder / "resumed", stopped)
    _, resumed = losses(folder / "resumed", trainer_on("data=2,fsdp=2,tensor=2", 1, True))
    return {"losses": found, "resumed": resumed}


def compiled_step():
    """The program of a step on a mesh of FSDP alone, and its memory."""
    recipe = dataclasses.replace(RECIPE, model=MODEL, batch=64, row_tokens=64)
    trainer = trainer_on("data=1,fsdp=8", 1, True, recipe)
    # Native attention is divided by hand, which would hide what XLA's partitioner makes of everything else.
    with without_native_kernels():
        compiled = trainer.lower(None, batch_shapes(1, 64, 64, trainer.mesh)).compile()
    return {"text": compiled.as_text(), "temporary": compiled.memory_analysis().temp_size_in_bytes}


def read_folder(folder):
    """How a folder is held on a mesh; importance measured there is that of one device."""
    from tests.training.elastic.test_importance import batch

    importance.LEAST_TOKENS = 16
    alone = FrozenModel.read(write_tiny_folder(folder))
    mesh = make_mesh(MeshShape.parse("fsdp=4,tensor=2"), 8)
    of, found = batch(rows=8, tokens=16), []
    single = importance.measure(alone.cfg, alone.params, [of])
    chosen = parallel.stacks_layers
    for stack in (False, True):
        parallel.stacks_layers = lambda mesh, stack=stack: stack
        for weights in ("f32", "bf16"):
            model = FrozenModel.read(folder, weights, mesh=mesh, stack=True)
            assert any(name.startswith("stacks.") for name in model.params) == stack
            embedding = model.params["embed.tokens"]
            divided = embedding.sharding.shard_shape(embedding.shape) != embedding.shape
            away = np.abs(np.asarray(embedding, np.float32) - alone.params["embed.tokens"]).max()
            found.append([weights, str(embedding.dtype), divided, model.fingerprint(), float(away)])
        measured = importance.measure(alone.cfg, alone.params, [of], mesh=mesh)
        for one, other in zip(jax.tree.leaves(vars(measured)), jax.tree.leaves(vars(single)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)
    parallel.stacks_layers = chosen
    return found


def muon():
    """Orthogonal matrices by four devices, and the program."""
    with jax.set_mesh(make_mesh(MeshShape(data=2, fsdp=2), 4)):
        step = jax.jit(orthogonal).lower(views(gradients(0))).compile()
        found = step(views(gradients(0)))
    return {"found": {name: value.tolist() for name, value in found.items()}, "text": step.as_text()}


def widths(folder):
    """Of one device and of four: the share of an expert on each, losses, and shares of visits."""
    from tests.training.experts.test_expert_widths import CFG

    tokens = np.random.default_rng(0).integers(1, 200, 512).astype(np.uint16)
    nothing = np.zeros(1, np.int64)
    documents = TokenizedDocuments(tokens, np.array([0, 512]), nothing, nothing, 0)
    batches, found = list(evaluation_batches(documents, 32, 4)), []
    for number, shape in enumerate((MeshShape(data=1), MeshShape(data=1, fsdp=2, tensor=2))):
        devices = make_mesh(shape, 4)
        text = TextPerplexity(CFG, batches, devices)
        of = WidthLosses(CFG, tiny_params(CFG), text, folder / f"{number}.json", devices)
        place = of.params["layers.0.experts.up"]
        share = place.addressable_shards[0].data.size / place.size
        measured = of.whole, of.loss_of(np.full((2, 4), 4))
        found.append([share, *measured, text.visited(of.params).paths.alone.tolist()])
    return found


def main(folder):
    jax.config.update("jax_num_cpu_devices", 8)
    folder = Path(folder)
    told = all_losses(folder)
    told |= {"compiled": compiled_step(), "muon": muon(), "widths": widths(folder)}
    print(json.dumps({**told, "read": read_folder(folder / "tiny")}))
