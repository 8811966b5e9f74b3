"""Describes the training of an encoder-decoder, and defines its job: on targets only, or with a teacher."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.experts.routing import Routing
from jaxllm.models import decoder, parameters
from jaxllm.models.architectures import architecture
from jaxllm.models.scanned_layers import Remat
from jaxllm.options import option
from jaxllm.training.data.sources import Source
from jaxllm.training.loop.checkpoints import Params
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.losses import router_penalty
from jaxllm.training.loop.trainer import Job
from jaxllm.training.seq2seq.forward import Drop, dropout, no_drop, target_hidden
from jaxllm.training.seq2seq.pairs import PairBatch
from jaxllm.training.settings import TrainSettings

# Their layers are those of `jaxllm.training.seq2seq.forward`.
FAMILIES = ("t5", "mt5", "switch_transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource(Source):
    """Source of pairs of one task.

    Attributes:
      label: name in metrics, and of the task in the model's folder.
      prefix: task prefix of each source; one token of the tokenizer.
    """

    label: str
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        texts = {"label": self.label, "prefix": self.prefix}
        texts |= {f"entry {number} of pairs": path for number, path in enumerate(self.pairs)}
        for key, value in texts.items():
            if not isinstance(value, str) or not value or value != value.strip():
                raise ConfigError(
                    f"the {key} of a source of pairs must be text without spaces around it, got {value!r:.80}"
                )
        if not self.pairs:
            raise ConfigError(f"the source {self.label} of an encoder-decoder has no pairs; give it some")

    @property
    def name(self) -> str:
        """See `label`."""
        return self.label


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqRecipe(TrainSettings):
    """The training of one encoder-decoder; the options' help describes it.

    A step has `batch` times `row_tokens` tokens on each side, in rows of one of the `lengths`. The model is a
    config in Hugging Face's keys, of one of `FAMILIES`.
    """

    folder = "seq2seq"

    model: dict[str, Any]
    sources: tuple[PairSource, ...] = option(
        help="Sources of pairs; the first one's task is the model's default.", entries=1
    )
    lengths: tuple[int, ...] = option(
        help="Lengths of rows in tokens; the last one is `row_tokens`.", low=1, entries=1, ascending=True
    )
    held_out_share: float = option(
        0.01, "Share of the pairs that is not trained on and picks the best checkpoint.", above=0, below=1
    )
    dropout: float = option(0.1, "Share of activations that training drops.", low=0, high=0.9)
    label_smoothing: float = option(
        0.1, "Share of the target distribution that all tokens have equally.", low=0, high=0.9
    )
    teacher_share: float = option(0.0, "Share of the loss from a teacher's distribution.", low=0, high=1)
    balance_weight: float = option(0.01, "Weight of the load-balancing loss of experts.", low=0)
    router_z_weight: float = option(0.001, "Weight of the routers' z-loss.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, dict) or self.model.get("model_type") not in FAMILIES:
            raise ConfigError(f"the recipe's model needs a model_type of {', '.join(FAMILIES)}")
        self.require_window(self.cfg.window_tokens)
        if self.lengths[-1] != self.row_tokens:
            raise ConfigError(
                f"the last of lengths must be row_tokens, {self.row_tokens}; got {self.lengths}"
            )
        capacity = max(self.cfg.expert_capacity, self.cfg.encoder.expert_capacity if self.cfg.encoder else 0)
        if 0 < capacity < self.row_tokens:
            raise ConfigError(
                f"experts accept at most {capacity} tokens of a row (expert_capacity), but rows have up to "
                f"{self.row_tokens}: training drops no token; raise expert_capacity"
            )

    @functools.cached_property
    def cfg(self) -> ModelConfig:
        """The model."""
        return architecture(self.model["model_type"]).config_from_hf(self.model)


def seq2seq_job(recipe: Seq2SeqRecipe, teacher: FrozenModel | None = None) -> Job:
    """Returns the job that trains a recipe's model."""
    cfg = recipe.cfg

    def init(key: jax.Array) -> Params:
        return init_seq2seq(cfg, key)

    def losses(params: Params, frozen: Any, batch: PairBatch) -> tuple[jax.Array, jax.Array]:
        logits, _ = target_logits(params, batch, cfg=cfg, dtype=jnp.dtype(recipe.computed_in))
        return cross_entropy(logits, batch.targets), jnp.zeros(())

    def drawn(params: Params, frozen: Any, batch: PairBatch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype, drop = jnp.dtype(recipe.computed_in), dropout(key, recipe.dropout)
        logits, routings = target_logits(params, batch, cfg=cfg, dtype=dtype, drop=drop, remat=recipe.remat)
        penalty = jnp.zeros(())
        for routing in routings:
            one = jax.tree.map(lambda each: each[None], routing)
            penalty += router_penalty(
                one, balance_weight=recipe.balance_weight, z_weight=recipe.router_z_weight
            ) / np.float32(len(routings))
        found = cross_entropy(logits, batch.targets, recipe.label_smoothing)
        if teacher is None:
            return found, penalty
        wanted, _ = target_logits(frozen, batch, cfg=teacher.cfg, dtype=dtype)
        share = np.float32(recipe.teacher_share)
        soft = optax.softmax_cross_entropy(logits, jax.nn.softmax(wanted))
        return share * soft + (np.float32(1) - share) * found, penalty

    flops = step_flops_per_token(cfg, recipe.row_tokens)
    if teacher is None:
        return Job(init, losses, drawn_losses=drawn, flops_per_token=flops)
    # A teacher only runs forward.
    flops += step_flops_per_token(teacher.cfg, recipe.row_tokens) / 3
    return Job(init, losses, dict(teacher.params), drawn_losses=drawn, flops_per_token=flops)


def target_logits(
    params: Mapping[str, jax.Array],
    batch: PairBatch,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    drop: Drop = no_drop,
    remat: Remat = "none",
) -> tuple[jax.Array, list[Routing]]:
    """Logits `[B, T, V]` float32 of a batch's targets, and the routing of each layer with experts; for the
    arguments see `target_hidden`."""
    computed, hidden, routings = target_hidden(params, batch, cfg=cfg, dtype=dtype, drop=drop, remat=remat)
    return decoder.logits(computed, hidden, cfg=cfg), routings


def cross_entropy(logits: jax.Array, targets: jax.Array | np.ndarray, smoothing: float = 0.0) -> jax.Array:
    """Cross entropy in nats `[B, T]` float32 of targets, with the share `smoothing` spread over all tokens
    (arXiv 1512.00567, section 7)."""
    targets = jnp.asarray(targets)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if not smoothing:
        return found
    even = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
    return np.float32(1 - smoothing) * found + np.float32(smoothing) * even


def init_seq2seq(cfg: ModelConfig, key: jax.Array) -> Params:
    """Returns random parameters to train from, such that the first scores and logits have a variance near
    one although T5 does not scale scores: queries are smaller by H^-0.5, and embeddings that the head is
    tied to are larger, because the head scales them by D^-0.5."""
    params = parameters.init_params(cfg, key)
    for name in params:
        if name.endswith(".q"):
            params[name] *= np.float32(cfg.head_dim**-0.5)
    if cfg.tied_head and cfg.logit_scale != 1.0:
        params["embed.tokens"] *= np.float32(0.25 / 0.02)
    return params
