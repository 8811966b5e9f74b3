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
    from jaxllm.bundle.writer import write_bundle
    from jaxllm.client import AsyncClient, Client
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
    from jaxllm.export.programs.model import open_program
    from jaxllm.layer_configs import RopeConfig
    from jaxllm.models.encoder.config import EncoderConfig
    from jaxllm.models.tiny_lm import TlmConfig
    from jaxllm.sampling_state import Sampling
    from jaxllm.serving.contexts.context import Context
    from jaxllm.serving.contexts.options import ContextOptions
    from jaxllm.serving.elastic.objectives import EndToEnd, EnergyBudget, Latency
    from jaxllm.serving.engine.answer import Answer
    from jaxllm.serving.engine.decoding import TokenLogprob
    from jaxllm.serving.engine.request import GenerationConfig, Session, Sliding
    from jaxllm.serving.ground.expert_options import ExpertOptions
    from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
    from jaxllm.serving.ground.options import EngineOptions
    from jaxllm.serving.ground.plan import Plan
    from jaxllm.serving.ground.prompt_rows import PromptRows
    from jaxllm.serving.ground.speculation_options import SpeculationOptions
    from jaxllm.serving.guided.grammar import Grammar
    from jaxllm.serving.host.direct_io import Storage
    from jaxllm.serving.opening.engine import Engine
    from jaxllm.serving.server.service import LLMService
    from jaxllm.text.prompts import Prompt


# Public name -> the module that defines it.
_HOMES = {
    "Answer": "jaxllm.serving.engine.answer",
    "AsyncClient": "jaxllm.client",
    "BucketMissing": "jaxllm.errors",
    "BudgetExceeded": "jaxllm.errors",
    "BundleError": "jaxllm.errors",
    "CheckpointError": "jaxllm.errors",
    "Client": "jaxllm.client",
    "ConfigError": "jaxllm.errors",
    "Context": "jaxllm.serving.contexts.context",
    "ContextGone": "jaxllm.errors",
    "ContextOptions": "jaxllm.serving.contexts.options",
    "ContextOverflow": "jaxllm.errors",
    "EncoderConfig": "jaxllm.models.encoder.config",
    "EndToEnd": "jaxllm.serving.elastic.objectives",
    "EnergyBudget": "jaxllm.serving.elastic.objectives",
    "Engine": "jaxllm.serving.opening.engine",
    "EngineOptions": "jaxllm.serving.ground.options",
    "ExpertOptions": "jaxllm.serving.ground.expert_options",
    "GenerationConfig": "jaxllm.serving.engine.request",
    "Grammar": "jaxllm.serving.guided.grammar",
    "JaxllmError": "jaxllm.errors",
    "LLMService": "jaxllm.serving.server.service",
    "Latency": "jaxllm.serving.elastic.objectives",
    "ModelConfig": "jaxllm.config",
    "NotFinite": "jaxllm.errors",
    "ObjectiveMissed": "jaxllm.errors",
    "Plan": "jaxllm.serving.ground.plan",
    "PrefillOptions": "jaxllm.serving.ground.int8_prefill_options",
    "ProgramError": "jaxllm.errors",
    "Prompt": "jaxllm.text.prompts",
    "PromptRows": "jaxllm.serving.ground.prompt_rows",
    "RopeConfig": "jaxllm.layer_configs",
    "Sampling": "jaxllm.sampling_state",
    "Session": "jaxllm.serving.engine.request",
    "Sliding": "jaxllm.serving.engine.request",
    "Slo": "jaxllm.elastic.slo",
    "SpeculationOptions": "jaxllm.serving.ground.speculation_options",
    "Storage": "jaxllm.serving.host.direct_io",
    "TemplateError": "jaxllm.errors",
    "TlmConfig": "jaxllm.models.tiny_lm",
    "TokenLogprob": "jaxllm.serving.engine.decoding",
    "Unreadable": "jaxllm.errors",
    "open_program": "jaxllm.export.programs.model",
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
    "ContextGone",
    "ContextOptions",
    "ContextOverflow",
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
    "open_program",
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
