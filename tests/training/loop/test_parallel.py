"""Meshes and process groups: the same losses however the work is divided, what is gathered, and what fits.

`main` trains, compiles, reads and measures on the meshes of one process with eight devices, and prints it.
"""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.native import without_native_kernels
from jaxllm.training.data.corpus import TokenizedDocuments
from jaxllm.training.data.rows import evaluation_batches
from jaxllm.training.decoders import pretrain_job
from jaxllm.training.elastic import importance
from jaxllm.training.experts.measures import TextPerplexity, WidthLosses
from jaxllm.training.loop import parallel
from jaxllm.training.loop.dry_run import batch_shapes
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.loop.optimizer import Matrix, orthogonal
from jaxllm.training.loop.parallel import (
    AXES,
    MeshShape,
    make_mesh,
    require_divisible,
    spec_of,
    start_process_group,
)
from jaxllm.training.loop.trainer import Trainer
from tests.tiny import tiny_params, write_tiny_folder
from tests.training.tiny_runs import SMOKE, started, told_by, train

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
    from tests.training.elastic.test_job import batch

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


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process with eight devices has found."""
    return told_by(started("tests.training.loop.test_parallel", tmp_path_factory.mktemp("meshes")))


@pytest.mark.slow
def test_losses_are_equal_on_any_mesh_and_across_a_resume_on_another(told):
    (_, one), *others = told["losses"]
    assert one[-1][1] < one[0][1]
    for (mesh, _, _), (divided, found) in zip(MESHES[1:], others, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-4, err_msg=mesh)
        assert divided == bool(mesh)
    np.testing.assert_allclose(told["resumed"], one[2:], rtol=1e-4)


def gathered_shapes(text):
    """Shapes of all results of all-gathers in a compiled program."""
    lines = re.findall(r"= (\(?.*?\)?) all-gather(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]


@pytest.mark.slow
def test_fsdp_gathers_parameters_and_never_the_batch(told):
    shapes = gathered_shapes(told["compiled"]["text"])
    assert shapes
    # Float activations of the whole batch would have 64 rows of 64 tokens, or 64 · 64 of them.
    assert not [shape for shape in shapes if math.prod(shape) >= 64 * 64 * MODEL.hidden_size]
    # A layer's weights, the embedding and the head, each at most a few times, and in the loop once for all.
    layer = 4 * MODEL.hidden_size * (MODEL.ffn_size * 3 + 2 * 64 + 2 * 32)
    ends = 2 * 4 * MODEL.vocab_size * MODEL.hidden_size
    assert sum(4 * math.prod(shape) for shape in shapes) < 4 * (layer + ends)
    # One device's share of the rows: of every activation that a layer makes 1/8.
    whole = 64 * 64 * 4 * (MODEL.ffn_size * 3 + MODEL.hidden_size * 8 + MODEL.vocab_size * 3)
    assert told["compiled"]["temporary"] < whole / 8 * 2 + 4 * (layer + ends)


@pytest.mark.slow
def test_a_folder_is_read_onto_a_mesh_and_its_importance_measured_there(told):
    assert len({digest for *_, digest, _ in told["read"]}) == 2
    for weights, dtype, divided, _, away in told["read"]:
        assert divided
        assert dtype == {"f32": "float32", "bf16": "bfloat16"}[weights]
        assert away < (0.05 if dtype == "bfloat16" else 1e-7)


@pytest.mark.slow
def test_devices_divide_the_matrices_of_a_shape(told):
    for name, value in orthogonal(views(gradients(0))).items():
        np.testing.assert_allclose(told["muon"]["found"][name], value, atol=1e-5)
    # Five matrices of 16 x 48 are eight with padding: two for each of four devices.
    assert "f32[2,16,48]" in told["muon"]["text"]


@pytest.mark.slow
def test_losses_of_widths_on_a_mesh_are_those_of_one_device(told):
    one, four = told["widths"]
    assert one[0] == 4 * four[0] == 1
    np.testing.assert_allclose(four[1:3], one[1:3], atol=2e-5)
    np.testing.assert_allclose(four[3], one[3], atol=0.01 * np.sum(one[3][0]))


def test_a_mesh_is_read_from_text():
    assert MeshShape.parse("") == MeshShape()
    assert MeshShape.parse("data=2, tensor=4") == MeshShape(data=2, tensor=4)
    for wrong in ("rows=2", "data", "data=x", "fsdp=0", "data=-1"):
        with pytest.raises(ConfigError, match="mesh"):
            MeshShape.parse(wrong)


def test_a_mesh_must_fit_devices_rows_and_the_model():
    with pytest.raises(ConfigError, match="--cpu-devices makes more"):
        make_mesh(MeshShape(data=4096), 4096)
    with pytest.raises(ConfigError, match="there are"):
        make_mesh(MeshShape(fsdp=64, tensor=64), 64)
    for sizes, message in (
        ((1, 5, 1), "fsdp=5 does not divide the model's width of"),
        ((1, 1, 3), "tensor=3 does not"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_divisible(SMOKE.model, AbstractMesh(sizes, AXES))


def test_parameters_are_divided_by_their_names():
    mesh = AbstractMesh((2, 4, 3), AXES)
    for name, shape, spec in (
        ("final_norm.scale", (8,), ()),
        ("head", (6, 8), ("tensor", "fsdp")),
        ("layers.0.attn.q", (6, 5, 8), ("tensor", None, "fsdp")),
        ("layers.0.attn.k", (7, 8), (None, "fsdp")),
        ("stacks.0.attn.q", (12, 6, 5, 8), (None, "tensor", None, "fsdp")),
        ("stacks.0.attn.q.left", (12, 6, 5, 4), (None, "tensor", None, None)),
        ("stacks.0.attn.q.right", (12, 6, 8), (None, None, "fsdp")),
    ):
        assert tuple(spec_of(name, shape, mesh)) == spec, name


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "group"),
    [
        ({}, False),
        ({**STEP, "SLURM_NTASKS": "16"}, True),
        # The shell of an allocation, whose tasks are started by srun.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_ML_PLATFORM": "JAX"}, True),
    ],
)
def test_a_cluster_starts_its_group(environment, group, monkeypatch):
    # JAX has set one of TPU's here.
    monkeypatch.setattr("os.environ", environment)
    started = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *given: started.append(given))
    start_process_group(None, None, None)
    assert started == [(None, None, None)] * group
    # Said otherwise, its environment is not asked.
    start_process_group("none", None, None)
    start_process_group("host:1", 2, 0)
    assert started[group:] == [("host:1", 2, 0)]


def test_groups_that_cannot_be_joined_are_named(monkeypatch):
    for coordinator in (None, "none"):
        with pytest.raises(ConfigError, match="--coordinator"):
            start_process_group(coordinator, 2, 0)
    for name, value in {**STEP, "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)

    def missing(*given):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", missing)
    with pytest.raises(ConfigError, match=r"environment names: coordinator_address.*--coordinator none"):
        start_process_group(None, None, None)
