"""Steps at the size of Llama-3.1-8B, lowered for accelerators without one: little code, fused attention, no
logits of a whole batch."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.models.parameters import init_params
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic.importance import MEASURES, unit_step
from jaxllm.training.elastic.job import joint_job, level_counts, level_job
from jaxllm.training.loop.dry_run import batch_shapes, placed_shapes
from jaxllm.training.loop.parallel import MeshShape, make_mesh
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.lora.run import LoraRecipe, lora_job
from jaxllm.training.pretrain.run import PretrainRecipe, pretrain_job
from tests.gpu_lowering import lowers_for_gpus  # noqa: F401

# Of JAX 0.12, see `jaxllm.kernels.fused_attention`.
pytestmark = [
    pytest.mark.usefixtures("lowers_for_gpus"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
KERNELS = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
MOST_OPERATIONS, MOST_S = 20_000, 10


def config(layers=32):
    return ModelConfig(
        model_type="llama", vocab_size=128256, hidden_size=4096, layers=layers, heads=32, kv_heads=8,
        head_dim=128, ffn_size=14336, window_tokens=131072, norm_eps=1e-5, tied_head=False,
        rope=RopeConfig(dim=128, theta=5e5),
    )  # fmt: skip


def lowered(kind, row_tokens, platform, precision="bfloat16"):
    """The text of a step with 8 rows, and the seconds that tracing and lowering took."""
    cfg, mesh = config(), make_mesh(MeshShape(data=1), 8)
    batch = batch_shapes(1, 8, row_tokens, mesh)
    half = jax.eval_shape(lambda: stacked(init_params(cfg, jax.random.key(0), jnp.bfloat16), cfg))
    half = placed_shapes(half, mesh)
    settings = {
        "steps": 4, "batch": 8, "row_tokens": row_tokens, "peak_learning_rate": 1e-4, "remat": "full",
        "precision": precision,
    }  # fmt: skip
    if kind in ("lora", "level"):
        recipe = LoraRecipe(**settings, sources=(Source(text="text.txt"),))
    if kind == "lora":
        trainer, frozen = Trainer(lora_job(cfg, {}, recipe), recipe, mesh, stack=True), half
    elif kind == "level":
        job = dataclasses.replace(level_job(cfg, {}, Ladder(), recipe), frozen={})
        trainer = Trainer(job, recipe, mesh, stack=True)
        counts = stacked(level_counts(cfg, Ladder(), 50), cfg)
        frozen = half | placed_shapes(jax.eval_shape(lambda: counts), mesh)
    elif kind == "joint":
        recipe = PretrainRecipe(**settings, model=cfg)
        whole = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        trainer = Trainer(joint_job(cfg, whole, Ladder(), recipe, original={}), recipe, mesh, stack=True)
        frozen = half
    elif kind in MEASURES:
        started = time.perf_counter()
        with jax.set_mesh(mesh):
            step = unit_step(cfg, mesh, remat="full", by=kind)
            own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), batch)
            text = step.trace(half, own).lower(lowering_platforms=(platform,)).as_text()
        return text, time.perf_counter() - started
    else:
        recipe = PretrainRecipe(**settings, model=cfg, optimizer=kind)
        trainer, frozen = Trainer(pretrain_job(recipe), recipe, mesh, stack=True), None
    started = time.perf_counter()
    step = trainer.lower(frozen, batch, platform)
    return step.as_text(), time.perf_counter() - started


def check(text, row_tokens, platform):
    assert len(re.findall(r"^\s*%\S+ = |^\s*\S+ = \"?\w+\.", text, re.MULTILINE)) < MOST_OPERATIONS
    assert KERNELS[platform] in text
    assert f"8x{row_tokens}x128256x" not in text


@pytest.mark.parametrize(("platform", "precision"), [("tpu", "bfloat16"), ("cuda", "float32")])
def test_a_step_of_32_layers_is_little_code(platform, precision):
    """In float32, too, for which this process's CPU has a kernel."""
    text, _ = lowered("lora", 512, platform, precision)
    check(text, 512, platform)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("kind", ["lora", "level", "joint", "gradient", "adamw", "muon"])
def test_steps_of_8b_lower_in_seconds(kind, platform):
    text, took_s = lowered(kind, 4096, platform)
    check(text, 4096, platform)
    assert took_s < MOST_S
