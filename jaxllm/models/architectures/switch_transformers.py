"""Switch Transformers: T5 with experts of limited capacity in the feed-forward block of every few layers.

A token only visits the most likely expert, weighted by its probability; tokens beyond the expert's capacity
skip it.
"""

import dataclasses
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.t5 import (
    T5_BUFFERS,
    T5_COPIES,
    T5_INERT_KEYS,
    T5_TOP_TENSORS,
    attention_tensors,
    feed_forward_tensors,
    read_t5,
    write_t5,
)
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture, Tensor

_DEFAULTS = {"d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12}


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only("router_bias", (None, False), "routers with biases are not implemented")
    reader.only("router_ignore_padding_tokens", (None, False), "there are no padding tokens here to ignore")
    reader.only("router_dtype", ("float32",), "routers compute in float32, for which the paper asks")
    activation = reader.text("dense_act_fn", "relu")
    tied = reader.flag("tie_word_embeddings", True)
    cfg = read_t5(reader, "switch_transformers", feed_forward=activation, scaled_head=tied, **_DEFAULTS)
    assert cfg.encoder is not None
    experts = reader.integer("num_experts", 8)
    capacity = reader.integer("expert_capacity", 64)
    sides = []
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg)):
        sparse = reader.integer(f"num_sparse_{name}_layers", 3)
        step = side.layers // sparse if sparse > 0 else side.layers
        # A repetition of the two.
        reader.only(f"{name}_sparse_step", (None, step), "it follows from the numbers of layers")
        marked = tuple(_is_sparse(layer, step) for layer in range(side.layers))
        own: dict[str, Any] = {}
        if any(marked):
            own = {
                "experts": experts,
                "experts_per_token": 1,
                "normalize_expert_weights": False,
                "expert_capacity": capacity,
                "sparse_layers": marked,
            }
        sides.append(dataclasses.replace(side, **own))
    return dataclasses.replace(sides[1], encoder=sides[0])


def _is_sparse(layer: int, step: int) -> bool:
    return layer % step == 1 or step == 1 if step > 0 else False


def _write(cfg: ModelConfig) -> dict[str, Any]:
    assert cfg.encoder is not None
    written = write_t5(cfg)
    written["dense_act_fn"] = written.pop("feed_forward_proj")
    written["tie_word_embeddings"] = cfg.tied_head
    written["num_experts"] = max(cfg.experts, cfg.encoder.experts)
    written["expert_capacity"] = max(cfg.expert_capacity, cfg.encoder.expert_capacity)
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg)):
        written[f"num_sparse_{name}_layers"] = sum(map(side.is_sparse, range(side.layers)))
    return written


def _feed_forward(layer: int) -> tuple[Tensor, ...]:
    lead = f"layer.{layer}.mlp."
    expert = lead + "experts.expert_{expert}."
    return (
        *feed_forward_tensors(layer, "mlp"),
        Tensor(f"{lead}router.classifier.weight", ("router",)),
        Tensor(f"{expert}wi.weight", ("experts.up",)),
        Tensor(f"{expert}wo.weight", ("experts.down",), transposed=True),
    )


SWITCH_TRANSFORMERS = Architecture(
    model_type="switch_transformers",
    read_config=_read,
    write_config=_write,
    class_name="SwitchTransformersForConditionalGeneration",
    top_tensors=T5_TOP_TENSORS,
    layer_tensors=(
        *attention_tensors(0, "SelfAttention", "attn"),
        *attention_tensors(1, "EncDecAttention", "cross"),
        *_feed_forward(2),
    ),
    layer_prefix="decoder.block.{}.",
    prefixes=("",),
    inert_keys=T5_INERT_KEYS - {"dense_act_fn"}
    | {"router_z_loss_coef", "router_aux_loss_coef", "add_router_probs", "add_cross_attention"},
    buffers=T5_BUFFERS,
    copies=T5_COPIES,
    encoder_tensors=(*attention_tensors(0, "SelfAttention", "attn"), *_feed_forward(1)),
    encoder_prefix="encoder.block.{}.",
    head_or_embedding=True,
)
