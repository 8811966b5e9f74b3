"""Registry of architectures by Hugging Face `model_type`: a file each, and a line here or an entry point of
the group `jaxllm.architectures`."""

from jaxllm.errors import ConfigError
from jaxllm.models.architectures.bart import BART
from jaxllm.models.architectures.ernie4_5 import ERNIE4_5
from jaxllm.models.architectures.exaone4 import EXAONE4
from jaxllm.models.architectures.gemma import GEMMA
from jaxllm.models.architectures.gemma2 import GEMMA2
from jaxllm.models.architectures.gemma3_text import GEMMA3_TEXT
from jaxllm.models.architectures.gemma4_text import GEMMA4_TEXT
from jaxllm.models.architectures.gpt2 import GPT2
from jaxllm.models.architectures.gpt_oss import GPT_OSS
from jaxllm.models.architectures.granite import GRANITE
from jaxllm.models.architectures.granitemoehybrid import GRANITEMOEHYBRID
from jaxllm.models.architectures.lfm2 import LFM2
from jaxllm.models.architectures.llama import LLAMA
from jaxllm.models.architectures.marian import MARIAN
from jaxllm.models.architectures.mbart import MBART
from jaxllm.models.architectures.ministral3 import MINISTRAL3
from jaxllm.models.architectures.mistral import MISTRAL
from jaxllm.models.architectures.mixtral import MIXTRAL
from jaxllm.models.architectures.mt5 import MT5
from jaxllm.models.architectures.olmo2 import OLMO2
from jaxllm.models.architectures.olmo3 import OLMO3
from jaxllm.models.architectures.olmoe import OLMOE
from jaxllm.models.architectures.opt import OPT
from jaxllm.models.architectures.phi import PHI
from jaxllm.models.architectures.phi3 import PHI3
from jaxllm.models.architectures.qwen2 import QWEN2
from jaxllm.models.architectures.qwen2_moe import QWEN2_MOE
from jaxllm.models.architectures.qwen3 import QWEN3
from jaxllm.models.architectures.qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from jaxllm.models.architectures.qwen3_5_text import QWEN3_5_TEXT
from jaxllm.models.architectures.qwen3_moe import QWEN3_MOE
from jaxllm.models.architectures.smollm3 import SMOLLM3
from jaxllm.models.architectures.stablelm import STABLELM
from jaxllm.models.architectures.switch_transformers import SWITCH_TRANSFORMERS
from jaxllm.models.architectures.t5 import T5
from jaxllm.models.translate import Architecture
from jaxllm.registry import Registry

_OWN: dict[str, Architecture] = {
    "bart": BART,
    "ernie4_5": ERNIE4_5,
    "exaone4": EXAONE4,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "gpt2": GPT2,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "lfm2": LFM2,
    "llama": LLAMA,
    "marian": MARIAN,
    "mbart": MBART,
    "ministral3": MINISTRAL3,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "mt5": MT5,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmoe": OLMOE,
    "opt": OPT,
    "phi": PHI,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "switch_transformers": SWITCH_TRANSFORMERS,
    "t5": T5,
}
ARCHITECTURES: Registry[Architecture] = Registry("jaxllm.architectures", _OWN)


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
