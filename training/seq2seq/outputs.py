"""Runs whatever is trained over a batch: a decoder over documents, or an encoder-decoder over pairs."""

import jax.numpy as jnp

from jaxllm.config import ModelConfig
from jaxllm.models.parameters import Params
from jaxllm.models.scanned_layers import Remat
from training.data.packing import Batch
from training.loop.losses import Outputs, outputs_of, outputs_of_hidden
from training.seq2seq.batches import PairBatch
from training.seq2seq.forward import target_hidden

AnyBatch = Batch | PairBatch


def outputs_of_any(
    params: Params,
    batch: AnyBatch,
    *,
    cfg: ModelConfig,
    dtype: jnp.dtype = jnp.float32,
    remat: Remat = "none",
) -> Outputs:
    """What a model gives for the targets of a batch; layers of an encoder-decoder keep all activations, for
    `remat` of others see `decoder.forward_documents`."""
    if not isinstance(batch, PairBatch):
        return outputs_of(params, batch, cfg=cfg, dtype=dtype, remat=remat)
    computed, hidden, _ = target_hidden(params, batch, cfg=cfg, dtype=dtype)
    return outputs_of_hidden(computed, hidden, cfg=cfg)
