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
    name, encoder = cfg.model_type, cfg.encoder
    no_prefill = f"({name}) is not implemented; prefill in floats"
    further: tuple[tuple[Room, object, str], ...] = (
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
            "experts apart", not cfg.experts,
            "the model is no mixture of experts: there are none to store apart",
        ),
        (
            "experts apart", encoder and encoder.experts != cfg.experts,
            "experts of an encoder-decoder are stored apart where both sides have as many of them",
        ),
        (
            "experts apart", cfg.post_norms,
            "experts of a model with norms behind its blocks cannot be stored apart",
        ),
        (
            "experts apart", cfg.shared_expert_size,
            "experts beside one that all tokens visit cannot be stored apart",
        ),
        (
            "tflite", cfg.experts or (encoder and encoder.experts),
            "a tflite model has no mixture of experts (its tokens would have to be sorted by expert); export "
            "it as stablehlo",
        ),
    )  # fmt: skip
    return next((why for where, applies, why in further if where == room and applies), None)


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
