"""Systems that run the same weights as ours, each in a child process of its own.

A peer is one file here and one line below.
"""

from benchmarks.peers.drafting import DraftedLlamaCpp, NestedEngine
from benchmarks.peers.llama import LlamaCpp
from benchmarks.peers.ours import DevicePrograms, JaxllmEngine, LiveSteps, Programs
from benchmarks.peers.peer import Opening, Peer, Progress, Session
from benchmarks.peers.torch_transformers import TorchTransformers

OURS = JaxllmEngine()
# Ours too, in other forms: `jaxllm bench export` measures them.
FORMS: tuple[Peer, ...] = (Programs(), DevicePrograms(), LiveSteps())
# With drafts and all weights in memory: `jaxllm bench speculative` measures them.
DRAFTED: tuple[Peer, ...] = (NestedEngine(), DraftedLlamaCpp())
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        LlamaCpp(),
        TorchTransformers(),
    )
}
SYSTEMS: dict[str, Peer] = {OURS.name: OURS, **{each.name: each for each in (*FORMS, *DRAFTED)}, **PEERS}
__all__ = ["DRAFTED", "FORMS", "OURS", "PEERS", "SYSTEMS", "Opening", "Peer", "Progress", "Session"]
