"""All cases, by name, and where their answers can be compared.

Recorded are the answers of the native kernels for AVX-512. Models are so sure of theirs that no token hangs
on the order in which floats are summed: other instruction sets, other processors and any number of threads
give the same, with two exceptions that `reason_to_skip` names.
"""

import importlib.util
import os

from jaxllm.kernels import native

# For their cases.
from tests.goldens import engine_cases, runner_cases  # noqa: F401
from tests.goldens.registry import CASES, Models

__all__ = ["CASES", "Models", "reason_to_skip"]

_RECORDED_WITH = "avx512"
# Weights in floats, or graphs of XLA's own.
_WITHOUT_KERNELS = (
    "memory-f32", "memory-bf16", "memory-without_native_kernels", "adapters-f32", "streamed-f32",
    "contexts-raw", "contexts-kivi", "contexts-computed_again", "programs-whole", "programs-level_50",
    "programs-drafted_by_a_model", "programs-drafted_by_a_level", "programs-drafted_by_n_grams",
    "programs-drafted_by_a_model_and_lookup",
)  # fmt: skip


def reason_to_skip(name: str) -> str | None:
    """Why a case cannot be compared here; None if it can."""
    kernels = native.kernels()
    if name.startswith("programs") and importlib.util.find_spec("flatbuffers") is None:
        return "exporters are not installed"
    if name == "prefill-two_processors" and len(os.sched_getaffinity(0)) < 2:
        return "takes two cores"
    if not kernels.native and name not in _WITHOUT_KERNELS:
        return "recorded with native kernels, which round activations to 8 bits as XLA does not"
    if "int4" in name and kernels.name != _RECORDED_WITH:
        return (
            f"recorded with {_RECORDED_WITH}: {kernels.name} sums groups of int4 weights in another order, "
            "and activations then round to another step now and then"
        )
    return None
