"""Registry of architectures by Hugging Face `model_type`: a name here, or an entry point of the group
`jaxllm.architectures`."""

from jaxllm.errors import ConfigError
from jaxllm.models.architectures.bart import BART, MARIAN, MBART
from jaxllm.models.architectures.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from jaxllm.models.architectures.gemma4_text import GEMMA4_TEXT
from jaxllm.models.architectures.gpt2 import GPT2, OPT
from jaxllm.models.architectures.gpt_oss import GPT_OSS
from jaxllm.models.architectures.granite import GRANITE, GRANITEMOEHYBRID
from jaxllm.models.architectures.lfm2 import LFM2
from jaxllm.models.architectures.llama import LLAMA, SMOLLM3
from jaxllm.models.architectures.mistral import MINISTRAL3, MISTRAL, MIXTRAL
from jaxllm.models.architectures.olmo import EXAONE4, OLMO2, OLMO3, OLMOE
from jaxllm.models.architectures.phi import ERNIE4_5, PHI, PHI3, STABLELM
from jaxllm.models.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jaxllm.models.architectures.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from jaxllm.models.architectures.t5 import MT5, SWITCH_TRANSFORMERS, T5
from jaxllm.models.translate import Architecture
from jaxllm.registry import Registry

_OWN = (
    BART, ERNIE4_5, EXAONE4, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA4_TEXT, GPT2, GPT_OSS, GRANITE,
    GRANITEMOEHYBRID, LFM2, LLAMA, MARIAN, MBART, MINISTRAL3, MISTRAL, MIXTRAL, MT5, OLMO2, OLMO3, OLMOE, OPT,
    PHI, PHI3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, SMOLLM3, STABLELM,
    SWITCH_TRANSFORMERS, T5,
)  # fmt: skip
ARCHITECTURES: Registry[Architecture] = Registry(
    "jaxllm.architectures", {each.model_type: each for each in _OWN}
)


def architecture(model_type: object) -> Architecture:
    """The architecture of a config.json's `model_type`.

    Raises:
      ConfigError: it is not one of those in `ARCHITECTURES`.
    """
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    raise ConfigError(
        f"model_type {model_type!r} is not supported; supported are {', '.join(ARCHITECTURES)}; use a "
        "checkpoint of one of these, or add one by an entry point of jaxllm.architectures"
    )
