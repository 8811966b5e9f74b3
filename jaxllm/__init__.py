"""One LLM for every app on a device: the public interface, complete in this module.

from jaxllm import Engine
engine = Engine.open()  # the packaged model; or a bundle, a Hugging Face folder or a GGUF file
for text in engine.stream("Once upon a time"):
    print(text, end="")

Names are imported when they are first used: `import jaxllm` imports neither JAX nor the host's packages.
Names that are not listed below are internal.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxllm.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxllm.bundle.writer import write_bundle as write_bundle
    from jaxllm.client import AsyncClient as AsyncClient
    from jaxllm.client import Client as Client
    from jaxllm.config import ModelConfig as ModelConfig
    from jaxllm.elastic.slo import Slo as Slo
    from jaxllm.errors import BucketMissing as BucketMissing
    from jaxllm.errors import BudgetExceeded as BudgetExceeded
    from jaxllm.errors import BundleError as BundleError
    from jaxllm.errors import CheckpointError as CheckpointError
    from jaxllm.errors import ConfigError as ConfigError
    from jaxllm.errors import ContextGone as ContextGone
    from jaxllm.errors import ContextOverflow as ContextOverflow
    from jaxllm.errors import JaxllmError as JaxllmError
    from jaxllm.errors import NotFinite as NotFinite
    from jaxllm.errors import ObjectiveMissed as ObjectiveMissed
    from jaxllm.errors import ProgramError as ProgramError
    from jaxllm.errors import TemplateError as TemplateError
    from jaxllm.errors import Unreadable as Unreadable
    from jaxllm.export.programs.model import open_program as open_program
    from jaxllm.layer_configs import RopeConfig as RopeConfig
    from jaxllm.models.encoder.config import EncoderConfig as EncoderConfig
    from jaxllm.models.tiny_lm import TlmConfig as TlmConfig
    from jaxllm.sampling_state import Sampling as Sampling
    from jaxllm.serving.contexts.context import Context as Context
    from jaxllm.serving.contexts.options import ContextOptions as ContextOptions
    from jaxllm.serving.elastic.objectives import EndToEnd as EndToEnd
    from jaxllm.serving.elastic.objectives import EnergyBudget as EnergyBudget
    from jaxllm.serving.elastic.objectives import Latency as Latency
    from jaxllm.serving.engine.decoding import TokenLogprob as TokenLogprob
    from jaxllm.serving.engine.request import GenerationConfig as GenerationConfig
    from jaxllm.serving.engine.request import Session as Session
    from jaxllm.serving.engine.request import Sliding as Sliding
    from jaxllm.serving.engine.step import Answer as Answer
    from jaxllm.serving.ground.expert_options import ExpertOptions as ExpertOptions
    from jaxllm.serving.ground.int8_prefill_options import PrefillOptions as PrefillOptions
    from jaxllm.serving.ground.options import EngineOptions as EngineOptions
    from jaxllm.serving.ground.plan import Plan as Plan
    from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings as PromptEmbeddings
    from jaxllm.serving.ground.speculation_options import SpeculationOptions as SpeculationOptions
    from jaxllm.serving.guided.grammar import Grammar as Grammar
    from jaxllm.serving.guided.grammar import Thought as Thought
    from jaxllm.serving.host.storage import Storage as Storage
    from jaxllm.serving.opening.engine import Engine as Engine
    from jaxllm.serving.server.service import LLMService as LLMService
    from jaxllm.text.prompts import Prompt as Prompt


# Module -> the public names that it defines.
_PUBLIC = {
    "bundle.writer": "write_bundle",
    "client": "AsyncClient Client",
    "config": "ModelConfig",
    "elastic.slo": "Slo",
    "errors": "BucketMissing BudgetExceeded BundleError CheckpointError ConfigError ContextGone "
    "ContextOverflow JaxllmError NotFinite ObjectiveMissed ProgramError TemplateError Unreadable",
    "export.programs.model": "open_program",
    "layer_configs": "RopeConfig",
    "models.encoder.config": "EncoderConfig",
    "models.tiny_lm": "TlmConfig",
    "sampling_state": "Sampling",
    "serving.contexts.context": "Context",
    "serving.contexts.options": "ContextOptions",
    "serving.elastic.objectives": "EndToEnd EnergyBudget Latency",
    "serving.engine.step": "Answer",
    "serving.engine.decoding": "TokenLogprob",
    "serving.engine.request": "GenerationConfig Session Sliding",
    "serving.ground.expert_options": "ExpertOptions",
    "serving.ground.int8_prefill_options": "PrefillOptions",
    "serving.ground.options": "EngineOptions",
    "serving.ground.plan": "Plan",
    "serving.ground.prompt_embeddings": "PromptEmbeddings",
    "serving.ground.speculation_options": "SpeculationOptions",
    "serving.guided.grammar": "Grammar Thought",
    "serving.host.storage": "Storage",
    "serving.opening.engine": "Engine",
    "serving.server.service": "LLMService",
    "text.prompts": "Prompt",
}
# Public name -> the module that defines it.
_HOMES = {name: f"jaxllm.{module}" for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]: the imports above name them for types


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
