"""Says what each room can do for a model: the one place where what a room lacks for an architecture is named.

Rooms ask `require_room`; `jaxllm info` and the documents list them all.
"""

from typing import Literal

from jaxllm.config import ModelConfig, decoder_alone_refusal
from jaxllm.errors import ConfigError

# Resident weights take every model; trees, contexts and batches every decoder alone.
Room = Literal["streamed weights", "levels", "integer prefill", "experts apart", "tflite"]
ROOMS: tuple[Room, ...] = ("streamed weights", "levels", "integer prefill", "experts apart", "tflite")


def room_refusal(cfg: ModelConfig, room: Room) -> str | None:
    """Why a room cannot take a model; None if it can."""
    if cfg.encoder is not None and room not in ("streamed weights", "experts apart"):
        return decoder_alone_refusal(cfg, room)
    return {
        "streamed weights": _streamed,
        "levels": _levels,
        "integer prefill": _integer_prefill,
        "experts apart": _experts_apart,
        "tflite": _tflite,
    }[room](cfg)


def require_room(cfg: ModelConfig, room: Room) -> None:
    """Raises ConfigError if a room cannot take a model."""
    reason = room_refusal(cfg, room)
    if reason is not None:
        raise ConfigError(reason)


def _streamed(cfg: ModelConfig) -> str | None:
    del cfg
    return None


def _levels(cfg: ModelConfig) -> str | None:
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
    if not cfg.experts:
        return None
    return (
        "a tflite model has no mixture of experts (its tokens would have to be sorted by expert); export it "
        "as stablehlo"
    )
