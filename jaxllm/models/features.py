"""Defines which features support a model: the only place that names unsupported architectures.

Features call `require_feature`; `jaxllm info` and the documents list them all.
"""

from typing import Literal, get_args

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

# Resident weights support every model.
Feature = Literal[
    "streamed weights",
    "levels",
    "integer prefill",
    "separate experts",
    "drafter",
    "contexts",
    "adapters",
    "tasks",
    "programs",
    "tflite",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)

# Features for decoder-only models, with the alternative.
_ENCODER_DECODER_REFUSALS: dict[Feature, str] = {
    "integer prefill": "prefill in floats",
    "tasks": "judge its answers: jaxllm eval pairs (of T5, mT5 and Switch), or those of jaxllm generate",
}
_ALTERNATIVES: dict[Feature, str] = {
    "streamed weights": (
        "give --memory that holds all weights, or narrower weights (jaxllm prepare --weights int4)"
    ),
    "levels": "use the whole model",
    "integer prefill": "prefill in floats",
    "separate experts": "prepare the model without --expert-bits",
    "drafter": "draft with another model, or ngram",
    "contexts": "send the conversation with each call",
    "adapters": "merge the adapter into the folder",
    "tasks": "judge the model by a text (jaxllm eval perplexity)",
    "programs": "run the model by jaxllm itself",
    "tflite": "run the model by jaxllm itself",
}
# Why models with state layers, and with mixed layers, do not support a feature.
_STATE_REFUSALS: dict[Feature, str] = {
    "streamed weights": "whose layers run together",
    "levels": "whose states have no units to leave out",
    "integer prefill": "whose states are computed in floats",
    "separate experts": "whose layers run together",
    "drafter": "whose states cannot go back over rejected tokens",
    "adapters": "of which some layers have no attention to adapt",
    "tasks": "whose states follow one line of tokens",
    "programs": "whose caches hold states",
    "tflite": "whose caches hold states",
}
_MIXED_REFUSALS: dict[Feature, str] = {
    "streamed weights": "which run together",
    "levels": "which have no units to leave out",
    "integer prefill": "which are computed in floats",
    "contexts": "whose chunks have no one shape",
    "adapters": "some of which have nothing to adapt",
    "tasks": "which read documents without branches",
    "programs": "whose caches have no one shape",
    "tflite": "whose caches have no one shape",
}


def feature_refusal(cfg: ModelConfig, feature: Feature) -> str | None:
    """Why a feature does not support a model; None if it does."""
    if cfg.encoder is not None and feature in _ENCODER_DECODER_REFUSALS:
        return _decoder_alone_refusal(cfg, feature, _ENCODER_DECODER_REFUSALS[feature])
    for applies, refusals, kind in (
        (cfg.states is not None, _STATE_REFUSALS, "state layers"),
        (cfg.mixed is not None, _MIXED_REFUSALS, "layers of two sizes that share keys and values"),
    ):
        if applies and feature in refusals:
            model = f"models with {kind}, as {cfg.model_type} is"
            return f"{feature}: not for {model}, {refusals[feature]}; {_ALTERNATIVES[feature]}"
    name, encoder = cfg.model_type, cfg.encoder
    no_prefill = f"({name}) is not implemented; prefill in floats"
    further: tuple[tuple[Feature, object, str], ...] = (
        (
            "levels", cfg.expert_bias or cfg.sink_logits,
            f"sub-models of experts with biases and of heads with sink logits ({name}) are not implemented; "
            "take the whole model",
        ),
        (
            "levels", encoder and (cfg.experts or encoder.experts),
            f"levels of an encoder-decoder with experts: not yet, and {name} is one; take the whole model",
        ),
        (
            "levels", cfg.joint_qk_norm,
            f"one norm goes over the queries or keys of all heads ({name}): such a model has no sub-models "
            "with fewer kv heads",
        ),
        (
            "integer prefill", cfg.experts,
            "a mixture of experts has no integer prefill: which products a token needs depends on the token",
        ),
        (
            "integer prefill", not cfg.pre_norms,
            f"integer prefill of blocks that read their input without a norm {no_prefill}",
        ),
        (
            "integer prefill", cfg.parallel_blocks,
            f"integer prefill of attention and feed-forward blocks side by side {no_prefill}",
        ),
        ("integer prefill", cfg.head_bias, f"integer prefill of a bias of the head {no_prefill}"),
        (
            "separate experts", not cfg.experts,
            "the model is no mixture of experts: there are none to store apart",
        ),
        (
            "separate experts", encoder and encoder.experts != cfg.experts,
            "experts of an encoder-decoder are stored separately where both sides have as many of them",
        ),
        (
            "separate experts", cfg.post_norms,
            "experts of a model with norms behind its blocks cannot be stored separately",
        ),
        (
            "separate experts", cfg.shared_expert_size,
            "experts beside one that all tokens visit cannot be stored separately",
        ),
        (
            "tflite", cfg.experts or (encoder and encoder.experts),
            "a tflite model has no mixture of experts (its tokens would have to be sorted by expert); export "
            "it as stablehlo",
        ),
    )  # fmt: skip
    return next((why for where, applies, why in further if where == feature and applies), None)


def require_feature(cfg: ModelConfig, feature: Feature) -> None:
    """Raises ConfigError if a feature does not support a model."""
    reason = feature_refusal(cfg, feature)
    if reason is not None:
        raise ConfigError(reason)


def _decoder_alone_refusal(cfg: ModelConfig, what: str, instead: str) -> str:
    return f"{what}: not for encoder-decoders yet, and {cfg.model_type} is one; {instead}"


def require_decoder_alone(cfg: ModelConfig, what: str, instead: str = "take a decoder alone") -> None:
    """Refuses an encoder-decoder if `what`, such as "plain models", only supports decoder-only models.

    Raises:
      ConfigError: the model has an encoder.
    """
    if cfg.encoder is not None:
        raise ConfigError(_decoder_alone_refusal(cfg, what, instead))
