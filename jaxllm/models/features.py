"""Defines which features support a model: the only place that names unsupported architectures.

Features call `require_room`; `jaxllm info` and the documents list them all.
"""

from typing import Literal, get_args

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

# Resident weights support every model.
Room = Literal[
    "streamed weights",
    "levels",
    "integer prefill",
    "experts apart",
    "drafter",
    "contexts",
    "adapters",
    "tasks",
    "programs",
    "tflite",
]
ROOMS: tuple[Room, ...] = get_args(Room)

# Features for decoder-only models, with the alternative.
_ENCODER_DECODER_REFUSALS: dict[Room, str] = {
    "integer prefill": "prefill in floats",
    "tasks": "judge its answers: jaxllm eval pairs (of T5, mT5 and Switch), or those of jaxllm generate",
}
_ALTERNATIVES: dict[Room, str] = {
    "streamed weights": (
        "give --memory that holds all weights, or narrower weights (jaxllm prepare --weights int4)"
    ),
    "levels": "use the whole model",
    "integer prefill": "prefill in floats",
    "experts apart": "prepare the model without --expert-bits",
    "drafter": "draft with another model, or ngram",
    "contexts": "send the conversation with each call",
    "adapters": "merge the adapter into the folder",
    "tasks": "judge the model by a text (jaxllm eval perplexity)",
    "programs": "run the model by jaxllm itself",
    "tflite": "run the model by jaxllm itself",
}
# Why models with state layers, and with mixed layers, do not support a feature.
_STATE_REFUSALS: dict[Room, str] = {
    "streamed weights": "whose layers run together",
    "levels": "whose states have no units to leave out",
    "integer prefill": "whose states are computed in floats",
    "experts apart": "whose layers run together",
    "drafter": "whose states cannot go back over rejected tokens",
    "adapters": "of which some layers have no attention to adapt",
    "tasks": "whose states follow one line of tokens",
    "programs": "whose caches hold states",
    "tflite": "whose caches hold states",
}
_MIXED_REFUSALS: dict[Room, str] = {
    "streamed weights": "which run together",
    "levels": "which have no units to leave out",
    "integer prefill": "which are computed in floats",
    "contexts": "whose chunks have no one shape",
    "adapters": "some of which have nothing to adapt",
    "tasks": "which read documents without branches",
    "programs": "whose caches have no one shape",
    "tflite": "whose caches have no one shape",
}


def room_refusal(cfg: ModelConfig, room: Room) -> str | None:
    """Why a feature does not support a model; None if it does."""
    if cfg.encoder is not None and room in _ENCODER_DECODER_REFUSALS:
        return _decoder_alone_refusal(cfg, room, _ENCODER_DECODER_REFUSALS[room])
    for applies, refusals, kind in (
        (cfg.states is not None, _STATE_REFUSALS, "state layers"),
        (cfg.mixed is not None, _MIXED_REFUSALS, "layers of two sizes that share keys and values"),
    ):
        if applies and room in refusals:
            model = f"models with {kind}, as {cfg.model_type} is"
            return f"{room}: not for {model}, {refusals[room]}; {_ALTERNATIVES[room]}"
    asks = {
        "levels": _levels,
        "integer prefill": _integer_prefill,
        "experts apart": _experts_apart,
        "tflite": _tflite,
    }
    return asks[room](cfg) if room in asks else None


def require_room(cfg: ModelConfig, room: Room) -> None:
    """Raises ConfigError if a feature does not support a model."""
    reason = room_refusal(cfg, room)
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


def _levels(cfg: ModelConfig) -> str | None:
    if cfg.expert_bias or cfg.sink_logits:
        return (
            f"sub-models of experts with biases and of heads with sink logits ({cfg.model_type}) are not "
            "implemented; take the whole model"
        )
    if cfg.encoder is not None and (cfg.experts or cfg.encoder.experts):
        return (
            f"levels of an encoder-decoder with experts: not yet, and {cfg.model_type} is one; take the "
            "whole model"
        )
    if not cfg.joint_qk_norm:
        return None
    return (
        f"one norm goes over the queries or keys of all heads ({cfg.model_type}): such a model has no "
        "sub-models with fewer kv heads"
    )


def _integer_prefill(cfg: ModelConfig) -> str | None:
    if cfg.experts:
        return (
            "a mixture of experts has no integer prefill: which products a token needs depends on the token"
        )
    for lacking, feature in (
        (not cfg.pre_norms, "blocks that read their input without a norm"),
        (cfg.parallel_blocks, "attention and feed-forward blocks side by side"),
        (cfg.head_bias, "a bias of the head"),
    ):
        if lacking:
            return f"integer prefill of {feature} ({cfg.model_type}) is not implemented; prefill in floats"
    return None


def _experts_apart(cfg: ModelConfig) -> str | None:
    if not cfg.experts:
        return "the model is no mixture of experts: there are none to store apart"
    if cfg.encoder is not None and cfg.encoder.experts != cfg.experts:
        return "experts of an encoder-decoder are stored apart where both sides have as many of them"
    if cfg.post_norms:
        return "experts of a model with norms behind its blocks cannot be stored apart"
    if cfg.shared_expert_size:
        return "experts beside one that all tokens visit cannot be stored apart"
    return None


def _tflite(cfg: ModelConfig) -> str | None:
    if not cfg.experts and not (cfg.encoder and cfg.encoder.experts):
        return None
    return (
        "a tflite model has no mixture of experts (its tokens would have to be sorted by expert); export it "
        "as stablehlo"
    )


def require_tokens_alone(cfg: ModelConfig) -> None:
    """Refuses prompt embeddings if layers read the tokens themselves.

    Raises:
      ConfigError: layers read the tokens.
    """
    if cfg.mixed is not None and cfg.mixed.layer_input_size:
        raise ConfigError(
            f"rows in place of tokens are not for models whose layers have inputs of each token, as "
            f"{cfg.model_type} has; give tokens"
        )
