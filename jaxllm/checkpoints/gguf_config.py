"""Translates the metadata of GGUF files into our config, by way of Hugging Face's keys.

Each supported architecture of llama.cpp is one entry of `FAMILIES`. Unknown keys that could change the
mathematics are refused, as `config_reader.py` does for Hugging Face's configs.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxllm.checkpoints.gguf_file import TEXT, GgufArray, GgufFile
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.models.architectures import architecture
from jaxllm.models.config_reader import ConfigReader

# Keys of an architecture without effect on logits, or that repeat facts of tensors.
_INERT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})


class Metadata(ConfigReader):
    """The keys of a file's architecture, without its name; an array with one equal number per layer is that
    number. A key without a default is required."""

    def __init__(self, file: GgufFile, name: str, ignore_keys: Collection[str] = ()) -> None:
        """Reads the keys of the architecture `name`."""
        prefix = f"{name}."
        keys: dict[str, Any] = {}
        for key, value in file.metadata.items():
            if key.startswith(prefix):
                if isinstance(value, GgufArray) and value.kind != TEXT and 0 < value.count < 1 << 16:
                    numbers = set(value.numbers())
                    value = numbers.pop() if len(numbers) == 1 else value
                keys[key.removeprefix(prefix)] = value
        super().__init__(keys, prefix, ignore_keys=ignore_keys)
        self.tensors = file.tensors

    def integer(self, key: str, default: int | None = None, **bounds: Any) -> int:
        """A whole number."""
        return super().integer(key, self._default(key, default), **bounds)

    def number(self, key: str, default: float | None = None, **bounds: Any) -> float:
        """A finite number."""
        return super().number(key, self._default(key, default), **bounds)

    def _default(self, key: str, default: Any) -> Any:
        if default is None:
            self.require(key, "download the file again")
        return default


@dataclasses.dataclass(frozen=True)
class GgufFamily:
    """One of llama.cpp's architectures.

    Attributes:
      model_type: our model type; that of "llama" with experts is "mixtral".
      keys: keys of the architecture besides the common ones, as Hugging Face's keys.
      interleaved: whether llama.cpp has rows of queries and keys in pairs, where Hugging Face has halves.
    """

    model_type: str
    keys: Callable[[Metadata], dict[str, Any]]
    interleaved: bool = False


def read_gguf_config(file: GgufFile, *, ignore_keys: Collection[str] = ()) -> ModelConfig:
    """The model that a GGUF file describes.

    Raises:
      ConfigError: its architecture is not supported, or a key is missing, unknown, malformed or refused.
      CheckpointError: the file lacks its embedding.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path} does not say which architecture it has; download it again")
    family, metadata = family_of(name), Metadata(file, name, ignore_keys)
    try:
        keys, tensors = {**_shape(metadata), **family.keys(metadata)}, metadata.tensors
        # Before anything of that size is made.
        layers, experts = keys["num_hidden_layers"], keys.get("num_experts", keys.get("num_local_experts"))
        if not 1 <= layers <= len(tensors):
            raise ConfigError(f"{layers} layers cannot be in {len(tensors)} tensors; download the file again")
        routers = {each.shape[0] for name, each in tensors.items() if name.endswith(".ffn_gate_inp.weight")}
        if experts and routers != {experts}:
            raise ConfigError(f"its routers do not have {experts} experts; download the file again")
        mixture = family.model_type == "llama" and metadata.integer("expert_count", 0)
        metadata.finish(inert_keys=_INERT)
        model_type = "mixtral" if mixture else family.model_type
        cfg = architecture(model_type).config_from_hf({**keys, "model_type": model_type})
        # Frequency factors (Llama 3.1).
        stored = file.tensors.get("rope_freqs.weight")
        if stored is None:
            return cfg
        if stored.kind != "F32" or cfg.rope is None or stored.shape != (cfg.rope.dim // 2,):
            raise CheckpointError(
                f"rope_freqs.weight is {stored.kind} of shape {list(stored.shape)}, which the model's rotary "
                "embedding does not accept; download the file again"
            )
        factors = tuple(stored.data.reshape(-1).view("<f4").astype(float).tolist())
        return dataclasses.replace(cfg, rope=dataclasses.replace(cfg.rope, factors=factors))
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{file.path}: {error}") from error


def family_of(name: str) -> GgufFamily:
    """The family of llama.cpp's architecture `name`.

    Raises:
      ConfigError: it is not one of `FAMILIES`.
    """
    if name not in FAMILIES:
        raise ConfigError(
            f"GGUF files of the architecture {name!r:.80} are not supported; supported are "
            f"{', '.join(FAMILIES)}: take the model's Hugging Face folder if its model_type is"
        )
    return FAMILIES[name]


def _shape(m: Metadata) -> dict[str, Any]:
    if "token_embd.weight" not in m.tensors:
        raise CheckpointError("the file lacks the tensor token_embd.weight; download it again")
    hidden, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    head_dim = m.integer("attention.key_length", hidden // max(heads, 1))
    if m.integer("attention.value_length", head_dim) != head_dim:
        raise ConfigError("values of another size than keys are not supported")
    return {
        "vocab_size": m.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": m.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": m.integer("attention.head_count_kv", heads),
        "intermediate_size": m.integer("feed_forward_length"),
        "max_position_embeddings": m.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in m.tensors,
        **_rope(m, head_dim),
    }


def _rope(m: Metadata, head_dim: int) -> dict[str, Any]:
    dim = m.integer("rope.dimension_count", head_dim)
    keys: dict[str, Any] = {"head_dim": head_dim, "rope_theta": m.number("rope.freq_base", 10000.0)}
    if dim != head_dim:
        keys["partial_rotary_factor"] = (dim + 0.5) / head_dim if head_dim else 0.0
    kind = m.text("rope.scaling.type", "none" if m.optional_number("rope.scale_linear") is None else "linear")
    factor = m.number("rope.scaling.factor", m.number("rope.scale_linear", 1.0))
    original = m.integer("rope.scaling.original_context_length", 0)
    if kind == "linear" and factor != 1.0:
        keys["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        attention = m.number("rope.scaling.attn_factor", 1.0)
        if attention != 1.0:
            raise ConfigError(
                f"rope.scaling.attn_factor is {attention}; jaxllm supports only 1: take the model's Hugging "
                "Face folder"
            )
        keys["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": m.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": m.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if original:
            keys["rope_scaling"]["original_max_position_embeddings"] = original
    elif kind not in ("none", "linear"):
        raise ConfigError(
            f"the rope scaling {kind!r:.80} is not supported; jaxllm reads none, linear and yarn from GGUF "
            "files: take a file without it"
        )
    return keys


def _rms(m: Metadata) -> dict[str, Any]:
    return {"rms_norm_eps": m.number("attention.layer_norm_rms_epsilon")}


def _biased(m: Metadata, name: str) -> bool:
    return f"blk.0.{name}.bias" in m.tensors


def _llama(m: Metadata) -> dict[str, Any]:
    experts, used = m.integer("expert_count", 0), m.integer("expert_used_count", 0)
    if experts:
        return {**_rms(m), "num_local_experts": experts, "num_experts_per_tok": used}
    return {**_rms(m), "attention_bias": _biased(m, "attn_output"), "mlp_bias": _biased(m, "ffn_up")}


def _experts(m: Metadata, sizes: Mapping[str, str], *, normalized: bool = False) -> dict[str, Any]:
    return {
        **_rms(m),
        "num_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "norm_topk_prob": normalized,
        **{key: m.integer(name) for key, name in sizes.items()},
    }


def _olmoe(m: Metadata) -> dict[str, Any]:
    return {**_experts(m, {}), "clip_qkv": m.number("attention.clamp_kqv", 0.0) or None}


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    shape = _rope(m, m.integer("attention.key_length"))
    size = m.integer("expert_feed_forward_length", m.integer("feed_forward_length"))
    # As in training, with untruncated bounds between kinds of frequencies.
    scaling = {**shape.get("rope_scaling", {"rope_type": "default"}), "truncate": False}
    return {
        **_rms(m),
        "rope_scaling": scaling,
        "intermediate_size": size,
        "num_local_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "sliding_window": m.integer("attention.sliding_window"),
        "attention_bias": _biased(m, "attn_q"),
    }


def _later_gemma(m: Metadata, largest_layers: int) -> dict[str, Any]:
    head_dim = m.integer("attention.key_length")
    # The largest model of each release divides by the width of a head if heads shared the model's width.
    largest = m.integer("block_count") == largest_layers
    scalar = (
        m.integer("embedding_length") // max(m.integer("attention.head_count"), 1) if largest else head_dim
    )
    return {
        **_rms(m),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": m.integer("attention.sliding_window"),
        "final_logit_softcapping": m.number("final_logit_softcapping", 0.0) or None,
    }


def _gemma2(m: Metadata) -> dict[str, Any]:
    return {**_later_gemma(m, 46), "attn_logit_softcapping": m.number("attn_logit_softcapping", 0.0) or None}


def _gemma3(m: Metadata) -> dict[str, Any]:
    return {**_later_gemma(m, 62), "rope_local_base_freq": m.number("rope.freq_base_swa", 10000.0)}


def _phi3(m: Metadata) -> dict[str, Any]:
    if scaled := {name for name in m.tensors if name.startswith("rope_factors_")}:
        raise ConfigError(f"it has {min(scaled)}: longrope is not supported; take the 4k model")
    return {**_rms(m), "sliding_window": m.integer("attention.sliding_window", 0) or None}


def _layer_norms(m: Metadata) -> dict[str, Any]:
    return {"layer_norm_eps": m.number("attention.layer_norm_epsilon"), "head_dim": None}


def _stablelm(m: Metadata) -> dict[str, Any]:
    parallel = m.flag("use_parallel_residual", False)
    return {**_layer_norms(m), "use_parallel_residual": parallel, "use_qkv_bias": _biased(m, "attn_q")}


def _granite(m: Metadata) -> dict[str, Any]:
    return {
        **_llama(m),
        "embedding_multiplier": m.number("embedding_scale", 1.0),
        "residual_multiplier": m.number("residual_scale", 1.0),
        "attention_multiplier": m.number("attention.scale"),
        "logits_scaling": m.number("logit_scale", 1.0),
    }


_OWN = {"moe_intermediate_size": "expert_feed_forward_length"}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", _llama, interleaved=True),
    "qwen2": GgufFamily("qwen2", _rms),
    "qwen2moe": GgufFamily("qwen2_moe", lambda m: _experts(m, _OWN | _SHARED)),
    "qwen3": GgufFamily("qwen3", _rms),
    "qwen3moe": GgufFamily("qwen3_moe", lambda m: _experts(m, _OWN, normalized=True)),
    "olmo2": GgufFamily("olmo2", _rms),
    "olmoe": GgufFamily("olmoe", _olmoe),
    "gpt-oss": GgufFamily("gpt_oss", _gpt_oss),
    "gemma": GgufFamily("gemma", lambda m: {**_rms(m), "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": GgufFamily("gemma2", _gemma2),
    "gemma3": GgufFamily("gemma3_text", _gemma3),
    "phi2": GgufFamily("phi", lambda m: {**_layer_norms(m), "tie_word_embeddings": False}),
    "phi3": GgufFamily("phi3", _phi3),
    "smollm3": GgufFamily("smollm3", _rms, interleaved=True),
    "granite": GgufFamily("granite", _granite, interleaved=True),
    "stablelm": GgufFamily("stablelm", _stablelm),
    # Its rows are in pairs in Hugging Face's folders too.
    "ernie4_5": GgufFamily("ernie4_5", lambda m: {**_rms(m), "use_bias": _biased(m, "ffn_up")}),
}
