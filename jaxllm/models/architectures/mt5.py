"""mT5: T5 of version 1.1 for a hundred languages; the states before its head are not scaled."""

from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.t5 import T5, read_t5, write_t5
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.translate import Architecture


def _read(reader: ConfigReader) -> ModelConfig:
    # Files have a separate head or none, independent of their config.
    reader.flag("tie_word_embeddings", True)
    defaults = {"vocab_size": 250112, "d_ff": 1024, "num_heads": 6, "num_layers": 8}
    return read_t5(reader, "mt5", feed_forward="gated-gelu", scaled_head=False, **defaults)


def _write(cfg: ModelConfig) -> dict[str, Any]:
    return {**write_t5(cfg), "tie_word_embeddings": cfg.tied_head}


MT5 = Architecture(
    model_type="mt5",
    read_config=_read,
    write_config=_write,
    class_name="MT5ForConditionalGeneration",
    top_tensors=T5.top_tensors,
    layer_tensors=T5.layer_tensors,
    layer_prefix=T5.layer_prefix,
    prefixes=T5.prefixes,
    inert_keys=T5.inert_keys,
    buffers=T5.buffers,
    copies=T5.copies,
    encoder_tensors=T5.encoder_tensors,
    encoder_prefix=T5.encoder_prefix,
    head_or_embedding=True,
)
