"""The compilers of GPUs and TPUs that are not there accept training steps: what fits a device's shared memory
shows no earlier. `make test-accelerators` runs it, in an environment that has these compilers."""

import os

import jax
import jax.numpy as jnp
import pytest

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.kernels import fused_attention
from jaxllm.models.parameters import init_params
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.data.sources import Source
from jaxllm.training.elastic.job import joint_job
from jaxllm.training.loop.dry_run import batch_shapes, placed_shapes
from jaxllm.training.loop.trainer import Trainer
from jaxllm.training.lora.run import LoraRecipe, lora_job
from jaxllm.training.pretrain.run import PretrainRecipe
from tests.training.accelerator.topologies import (
    DEVICES,
    TPU,
    find_compilers,
    mesh_of,
    platform_of,
    shared_memory_of,
)

for compiler in ("jax_plugins.xla_cuda13", "libtpu"):
    pytest.importorskip(compiler)
find_compilers()

# Of JAX's backend for the GPU's kernel, see `fused_attention`.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
WIDTHS = (64, 80, 128, 256)
# JAXLLM_ALL_STEPS compiles every step, in a quarter of an hour; else those that were the first not to fit.
ALL = "JAXLLM_ALL_STEPS" in os.environ
LORA = [
    *((device, *step) for device in DEVICES for step in ((128, "float32"), (256, "bfloat16"))),
    (TPU, 64, "bfloat16"),
]
JOINT = [(device, 256, "float32") for device in (DEVICES[0], TPU)]
EVERY = [
    (device, width, precision)
    for device in DEVICES
    for width in WIDTHS
    for precision in ("float32", "bfloat16")
]


def compiled(kind, device, width, precision, monkeypatch):
    """A step of a small model with heads of a width, and the text of its lowering."""
    mesh = mesh_of(device, monkeypatch)
    if device != TPU:
        monkeypatch.setattr(fused_attention, "shared_memory_bytes", lambda: shared_memory_of(device))
    cfg = ModelConfig(
        model_type="llama", vocab_size=512, hidden_size=128, layers=2, heads=2, kv_heads=1, head_dim=width,
        ffn_size=128, window_tokens=256, norm_eps=1e-5, tied_head=True, rope=RopeConfig(dim=width, theta=1e4),

    )  # fmt: skip
    settings = {
        "steps": 4, "batch": 1, "row_tokens": 256, "peak_learning_rate": 1e-4, "remat": "full",
        "precision": precision,
    }  # fmt: skip
    dtype = jnp.dtype(precision)
    frozen = jax.eval_shape(lambda: stacked(init_params(cfg, jax.random.key(0), dtype), cfg))
    if kind == "lora":
        recipe = LoraRecipe(**settings, sources=(Source(text="text.txt"),))
        trainer = Trainer(lora_job(cfg, {}, recipe), recipe, mesh, stack=True)
    else:
        recipe = PretrainRecipe(**settings, model=cfg)
        whole = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        job = joint_job(cfg, whole, Ladder(levels=(50, 100)), recipe, original={})
        trainer = Trainer(job, recipe, mesh, stack=True)
    lowered = trainer.lower(placed_shapes(frozen, mesh), batch_shapes(1, 1, 256, mesh), platform_of(device))
    with jax.set_mesh(mesh):
        lowered.compile()
    return lowered.as_text()


@pytest.mark.parametrize(("device", "width", "precision"), EVERY if ALL else LORA)
def test_a_step_of_an_adapter_compiles(device, width, precision, monkeypatch):
    text = compiled("lora", device, width, precision, monkeypatch)
    assert ("tpu_custom_call" if device == TPU else "triton") in text


@pytest.mark.parametrize(("device", "width", "precision"), EVERY if ALL else JOINT)
def test_a_joint_step_compiles(device, width, precision, monkeypatch):
    text = compiled("joint", device, width, precision, monkeypatch)
    assert ("tpu_custom_call" if device == TPU else "triton") in text
