"""The host side: open a model, keep compiled graphs, answer requests.

from serving import Engine
engine = Engine.open()                      # the model in the package; or a bundle, or a HF folder
for text in engine.stream("Once upon a time"):
    print(text, end="")
"""

from jaxllm.sampling import Sampling
from serving.engine import Engine
from serving.generation import Generation, GenerationConfig
from serving.options import EngineOptions

__all__ = ["Engine", "EngineOptions", "Generation", "GenerationConfig", "Sampling"]
