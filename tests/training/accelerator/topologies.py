"""Describes GPUs and TPUs that are not there, for JAX's compilers of them."""

import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

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


def shared_memory_of(device: str) -> int:
    """What a block of threads may have, in bytes."""
    return GPUS[device][1]


def platform_of(device: str) -> str:
    return "tpu" if device == TPU else "cuda"


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

    if platform_of(device) == "tpu":
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
