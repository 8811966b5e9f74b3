"""One LLM for every app on a device: this module is the front door, and everything public is named here.

from jaxllm import Engine
engine = Engine.open()  # the packaged model; or a bundle, a Hugging Face folder or a GGUF file
for text in engine.stream("Once upon a time"):
    print(text, end="")

A name is imported when it is first used: `import jaxllm` alone imports neither JAX nor the host's packages.
Whatever the list below does not name is internal.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.bundle.writer import write_bundle
    from jaxllm.client.async_client import AsyncClient
    from jaxllm.client.client import Client
    from jaxllm.config import ModelConfig
    from jaxllm.elastic.slo import Slo
    from jaxllm.errors import (
        BucketMissing,
        BudgetExceeded,
        BundleError,
        CheckpointError,
        ConfigError,
        ContextGone,
        ContextOverflow,
        JaxllmError,
        NotFinite,
        ObjectiveMissed,
        ProgramError,
        TemplateError,
        Unreadable,
    )
    from jaxllm.models.encoder.config import EncoderConfig
    from jaxllm.models.flax_front import DecoderLM, DualHeadEncoder, Encoder
    from jaxllm.models.tiny_lm import TlmConfig
    from jaxllm.rope_config import RopeConfig
    from jaxllm.sampling_state import Sampling
    from jaxllm.text.prompts import Prompt
    from serving.answer import Answer
    from serving.contexts.answer import ContextAnswer
    from serving.contexts.context import Context
    from serving.contexts.options import ContextOptions
    from serving.engine import Engine
    from serving.guided.grammar import Grammar
    from serving.guided.logprobs import TokenLogprob
    from serving.host.direct_io import Storage
    from serving.int8_prefill.options import PrefillOptions
    from serving.options import EngineOptions
    from serving.planned_answer import PlannedAnswer
    from serving.planning.objectives import EndToEnd, EnergyBudget, Latency
    from serving.planning.planner import Plan
    from serving.prompt_rows import PromptRows
    from serving.request import GenerationConfig, Session
    from serving.service import LLMService
    from serving.sliding import Sliding
    from serving.speculation.options import SpeculationOptions
    from serving.weights.experts.options import ExpertOptions

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOMES = {
    "Answer": "serving.answer",
    "AsyncClient": "jaxllm.client.async_client",
    "BucketMissing": "jaxllm.errors",
    "BudgetExceeded": "jaxllm.errors",
    "BundleError": "jaxllm.errors",
    "CheckpointError": "jaxllm.errors",
    "Client": "jaxllm.client.client",
    "ConfigError": "jaxllm.errors",
    "Context": "serving.contexts.context",
    "ContextAnswer": "serving.contexts.answer",
    "ContextGone": "jaxllm.errors",
    "ContextOptions": "serving.contexts.options",
    "ContextOverflow": "jaxllm.errors",
    "DecoderLM": "jaxllm.models.flax_front",
    "DualHeadEncoder": "jaxllm.models.flax_front",
    "Encoder": "jaxllm.models.flax_front",
    "EncoderConfig": "jaxllm.models.encoder.config",
    "EndToEnd": "serving.planning.objectives",
    "EnergyBudget": "serving.planning.objectives",
    "Engine": "serving.engine",
    "EngineOptions": "serving.options",
    "ExpertOptions": "serving.weights.experts.options",
    "GenerationConfig": "serving.request",
    "Grammar": "serving.guided.grammar",
    "JaxllmError": "jaxllm.errors",
    "LLMService": "serving.service",
    "Latency": "serving.planning.objectives",
    "ModelConfig": "jaxllm.config",
    "NotFinite": "jaxllm.errors",
    "ObjectiveMissed": "jaxllm.errors",
    "Plan": "serving.planning.planner",
    "PlannedAnswer": "serving.planned_answer",
    "PrefillOptions": "serving.int8_prefill.options",
    "ProgramError": "jaxllm.errors",
    "Prompt": "jaxllm.text.prompts",
    "PromptRows": "serving.prompt_rows",
    "RopeConfig": "jaxllm.rope_config",
    "Sampling": "jaxllm.sampling_state",
    "Session": "serving.request",
    "Sliding": "serving.sliding",
    "Slo": "jaxllm.elastic.slo",
    "SpeculationOptions": "serving.speculation.options",
    "Storage": "serving.host.direct_io",
    "TemplateError": "jaxllm.errors",
    "TlmConfig": "jaxllm.models.tiny_lm",
    "TokenLogprob": "serving.guided.logprobs",
    "Unreadable": "jaxllm.errors",
    "write_bundle": "jaxllm.bundle.writer",
}
__all__ = [
    "Answer",
    "AsyncClient",
    "BucketMissing",
    "BudgetExceeded",
    "BundleError",
    "CheckpointError",
    "Client",
    "ConfigError",
    "Context",
    "ContextAnswer",
    "ContextGone",
    "ContextOptions",
    "ContextOverflow",
    "DecoderLM",
    "DualHeadEncoder",
    "Encoder",
    "EncoderConfig",
    "EndToEnd",
    "EnergyBudget",
    "Engine",
    "EngineOptions",
    "ExpertOptions",
    "GenerationConfig",
    "Grammar",
    "JaxllmError",
    "LLMService",
    "Latency",
    "ModelConfig",
    "NotFinite",
    "ObjectiveMissed",
    "Plan",
    "PlannedAnswer",
    "PrefillOptions",
    "ProgramError",
    "Prompt",
    "PromptRows",
    "RopeConfig",
    "Sampling",
    "Session",
    "Sliding",
    "Slo",
    "SpeculationOptions",
    "Storage",
    "TemplateError",
    "TlmConfig",
    "TokenLogprob",
    "Unreadable",
    "write_bundle",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
