"""The host side: open a model, keep compiled graphs, answer requests.

from serving import Engine
engine = Engine.open()                      # the model in the package; or a bundle, or a HF folder
for text in engine.stream("Once upon a time"):
    print(text, end="")
"""

import importlib
from typing import TYPE_CHECKING, Any

import jaxllm

if TYPE_CHECKING:
    from jaxllm.sampling import Sampling
    from serving.engine import Engine
    from serving.generation import Generation, GenerationConfig, Session
    from serving.options import EngineOptions

if jaxllm.__file__ is None:
    # Its modules might still be found, by another way, and then not know where their models are.
    raise ImportError(
        f"{next(iter(jaxllm.__path__))} is found under the name jaxllm, and is no package: a clone of the "
        "project, say; rename that folder, move the script, or install jaxllm again (pip install -e)"
    )

_HOMES = {
    "Engine": "serving.engine",
    "EngineOptions": "serving.options",
    "Generation": "serving.generation",
    "GenerationConfig": "serving.generation",
    "Sampling": "jaxllm.sampling",
    "Session": "serving.generation",
}
__all__ = ["Engine", "EngineOptions", "Generation", "GenerationConfig", "Sampling", "Session"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that `jaxllm --version` does not wait for JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'serving' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
