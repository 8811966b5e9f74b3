"""The compilers of GPUs and TPUs that are not there accept training steps: what fits a device's shared memory
shows no earlier. `make test-accelerators` runs it, in an environment that has these compilers."""

import os
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.kernels import fused_attention
from jaxllm.models.parameters import init_params
from jaxllm.models.scanned_layers import stacked
from jaxllm.training.data.sources import Source
from jaxllm.training.decoders import LoraRecipe, PretrainRecipe, lora_job
from jaxllm.training.elastic.job import joint_job
from jaxllm.training.loop.dry_run import batch_shapes, placed_shapes
from jaxllm.training.loop.trainer import Trainer

# Shared memory of a processor and of a block, processors, their threads, compute capability, memory: as
# XLA asks the driver.
GPUS = {
    "NVIDIA H100 80GB HBM3": (233_472, 232_448, 132, 2048, (9, 0), 84_978_434_048),
    "NVIDIA A100-SXM4-80GB": (167_936, 166_912, 108, 2048, (8, 0), 84_987_740_160),
    "NVIDIA GeForce RTX 4090": (102_400, 101_376, 128, 1536, (8, 9), 25_250_627_584),
    "NVIDIA B200": (233_472, 232_448, 148, 2048, (10, 0), 191_000_000_000),
}
TPU = "TPU v5 lite"
DEVICES = (*GPUS, TPU)


def find_compilers() -> None:
    """Says where ptxas and libdevice are. Before JAX makes its first backend."""
    cuda = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
    os.environ["PATH"] = f"{cuda / 'bin'}:{os.environ['PATH']}"
    # Without a device nothing can be timed, and nobody answers for a TPU's host.
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={cuda}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # No process has the TPU to itself, for there is none.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


def mesh_of(device: str, monkeypatch: Any) -> Mesh:
    """One device of a kind, for compiling alone."""
    from jax._src import xla_bridge
    from jax.experimental import topologies

    if device == TPU:
        topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    else:
        # JAX takes "gpu" for the one that is there.
        known = xla_bridge.canonicalize_platform
        monkeypatch.setattr(
            xla_bridge,
            "canonicalize_platform",
            lambda name: "cuda" if name in ("gpu", "cuda") else known(name),
        )
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=_target(device), topology="1x1x1"
        )
    one = np.asarray(topology.devices[:1]).reshape(1, 1, 1)
    return Mesh(one, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def _target(device: str) -> str:
    of_core, of_block, cores, threads, (major, minor), memory = GPUS[device]
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
        shared_memory_per_core: {of_core} shared_memory_per_block_optin: {of_block}
        shared_memory_per_block: 49152
        core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.9 memory_bandwidth: 2000000000000
        l2_cache_size: 52428800 device_memory_size: {memory}
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        registers_per_core_limit: 65536 registers_per_block_limit: 65536
        cuda_compute_capability {{ major: {major} minor: {minor} }}
      }}
      platform_name: "CUDA" device_description_str: "{device}"
      dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
    """


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
        monkeypatch.setattr(fused_attention, "shared_memory_bytes", lambda: GPUS[device][1])
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
    lowered = trainer.lower(
        placed_shapes(frozen, mesh), batch_shapes(1, 1, 256, mesh), "tpu" if device == TPU else "cuda"
    )
    with jax.set_mesh(mesh):
        lowered.compile()
    return lowered.as_text()


@pytest.mark.parametrize(
    ("kind", "device", "width", "precision"),
    [(kind, *step) for kind, some in (("lora", LORA), ("joint", JOINT)) for step in (EVERY if ALL else some)],
)
def test_a_step_compiles(kind, device, width, precision, monkeypatch):
    text = compiled(kind, device, width, precision, monkeypatch)
    assert ("tpu_custom_call" if device == TPU else "triton") in text
