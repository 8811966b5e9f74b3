"""Systems that run the same weights as ours, each in a child process of its own.

A peer is one file here and one line below.
"""

from typing import Any

from benchmarks.peers.llama import FORMATS, open_drafted, open_llama, refusal, systems
from benchmarks.peers.ours import (
    EngineSession,
    NestedSession,
    open_device_programs,
    open_live_steps,
    open_programs,
)
from benchmarks.peers.peer import Opening, Peer, Progress, Session
from benchmarks.peers.torch_transformers import DTYPES, TransformersSession

OURS = Peer("jaxllm", EngineSession, systems=lambda weights: {"jaxllm": weights})
# Ours too, in other forms: `jaxllm bench export` measures them.
FORMS = (
    Peer("programs", open_programs),
    # Opened as a device opens them: what no program draws, NumPy does.
    Peer("device-programs", open_device_programs),
    Peer("live-steps", open_live_steps),
)
_LLAMA: dict[str, Any] = {"packages": ("llama_cpp", "gguf"), "refusal": refusal}
# With drafts and all weights in memory: `jaxllm bench speculative` measures them.
DRAFTED = (
    Peer("jaxllm, nested", NestedSession),
    Peer(
        "llama.cpp, drafted",
        open_drafted,
        systems=lambda weights: {"llama.cpp, drafted": FORMATS[weights]},
        **_LLAMA,
    ),
)
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        # At the format nearest to each of our widths.
        Peer("llama.cpp", open_llama, systems=systems, **_LLAMA),
        Peer(
            "transformers",
            TransformersSession,
            packages=("torch", "transformers"),
            # Both widths, whatever ours is: others take further packages.
            systems=lambda weights: {f"transformers-{width}": width for width in DTYPES},
            slow=True,
        ),
    )
}
SYSTEMS: dict[str, Peer] = {each.name: each for each in (OURS, *FORMS, *DRAFTED, *PEERS.values())}
__all__ = ["DRAFTED", "FORMS", "OURS", "PEERS", "SYSTEMS", "Opening", "Peer", "Progress", "Session"]
