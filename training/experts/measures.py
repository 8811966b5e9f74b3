"""Measures the losses of narrower experts, each loss once: of a text, or of pairs.

A mixture alone is judged by the perplexity of a text; an encoder-decoder on pairs by that of the targets, or
by Rouge-2 of its answers, by which EdgeMoE chooses widths (arXiv 2308.14352, section 3.2 and figure 7).
"""

import abc
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.experts.prediction import PathCounts, TokenExperts, count_paths, count_tokens
from jaxllm.files.input_files import read_text
from jaxllm.models import decoder
from jaxllm.models.parameters import Params, param_specs, sparse_layers
from jaxllm.quant import dequantize, quantize
from jaxllm.tasks.rouge import require_rouge, rouge
from jaxllm.training.data.rows import Batch
from jaxllm.training.loop.losses import Outputs, next_token_losses
from jaxllm.training.loop.parallel import MeshShape, make_mesh, place_rows, placed
from jaxllm.training.loop.run_files import write_json
from jaxllm.training.seq2seq.pairs import PairBatch, PairRows
from jaxllm.training.seq2seq.run import Translator, cross_entropy, target_logits

_LOWEST = 2


class Measure(abc.ABC):
    """Measures a model on some data, by default its nats per token.

    Attributes:
      others: bitwidth of all other experts while one is lowered; 32 leaves them unchanged.
    """

    others: int = 32

    @abc.abstractmethod
    def value(self, params: Params) -> float:
        """Measures a model with these parameters."""

    def loss(self, value: float, whole: float) -> float:
        """Returns the loss of a model with the measured `value`, relative to `whole` of the float model: by
        default the growth of the perplexity, as a share."""
        return math.exp(value - whole) - 1


class WidthLosses:
    """Losses by the experts' widths, stored in a file.

    Attributes:
      params: parameters of the float model, on the devices.
    """

    def __init__(
        self, cfg: ModelConfig, params: Params, measure: Measure, path: Path, mesh: Mesh | None = None
    ) -> None:
        """Reads losses of earlier measurements.

        Args:
          cfg: config of a mixture.
          params: float32 arrays.
          measure: measure of the losses.
          path: path of the file of losses.
          mesh: devices that parameters are divided over; None for the default one.

        Raises:
          CheckpointError: the file is damaged.
        """
        self._cfg, self._measure, self._path = cfg, measure, path
        self._layers, self._specs = sparse_layers(cfg), param_specs(cfg)
        self._known: dict[str, float] = {}
        try:
            if path.exists():
                self._known = {key: float(value) for key, value in json.loads(read_text(path)).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error
        self._narrow: dict[tuple[int, str], np.ndarray] = {}
        self._mesh = mesh or make_mesh(MeshShape(data=1), 1)
        self.params: Params = placed(params.items(), self._mesh)

    @property
    def shape(self) -> tuple[int, int]:
        """`(L_sparse, E)`, an encoder's layers first."""
        return len(self._layers), self._cfg.experts

    @property
    def whole(self) -> float:
        """Measured value of the float model."""
        return self._measured("whole", lambda: self.params)

    def loss_of(self, bits: np.ndarray) -> float:
        """The loss as a share, by widths `[L_sparse, E]`; 32 changes nothing."""
        bits, value = np.asarray(bits, np.int8), self.whole
        if np.any(bits != 32):
            key = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
            value = self._measured(key, lambda: self._with_widths(bits))
        return self._measure.loss(value, self.whole)

    def importance(self, report: Callable[[int, int], None]) -> np.ndarray:
        """Returns the loss of lowering one expert to the narrowest width, relative to all at the width of
        the others (see `Measure`), `[L_sparse, E]`.

        `report` is a callback for (experts done, number of experts).
        """
        found, others = np.zeros(self.shape), np.full(self.shape, self._measure.others, np.int8)
        before = self.loss_of(others)
        for done, at in enumerate(np.ndindex(*self.shape), start=1):
            alone = others.copy()
            alone[at] = _LOWEST
            found[at] = self.loss_of(alone) - before
            report(done, found.size)
        return found

    def _measured(self, key: str, params: Callable[[], Params]) -> float:
        if key not in self._known:
            value = self._measure.value(params())
            if not math.isfinite(value):
                raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
            self._known[key] = value
            write_json(self._path, self._known)
        return self._known[key]

    def _with_widths(self, bits: np.ndarray) -> Params:
        changed: dict[str, Any] = {}
        for layer, widths in zip(self._layers, bits, strict=True):
            if np.all(widths == 32):
                continue
            for name in (each for each in self._specs if each.startswith(f"{layer}experts.")):
                stack = np.array(self.params[name], np.float32)
                for width in np.unique(widths[widths < 32]):
                    chosen = widths == width
                    stack[chosen] = self._at(int(width), name)[chosen]
                changed |= placed([(name, stack)], self._mesh)
        return {**self.params, **changed}

    def _at(self, width: int, name: str) -> np.ndarray:
        """A stack of experts at a width, dequantized."""
        if (width, name) not in self._narrow:
            value = np.asarray(self.params[name], np.float32)
            if width == 16:
                self._narrow[width, name] = np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)
            else:
                axis = contracted_axis(self._specs[name])
                stored = quantize(value, bits=width, axis=axis)  # pyright: ignore[reportArgumentType]
                self._narrow[width, name] = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)))
        return self._narrow[width, name]


class Visited(NamedTuple):
    """Visits of a text's tokens to the experts of a decoder or encoder: counts of successive experts, and the
    experts of each token."""

    paths: PathCounts
    tokens: TokenExperts


def _visits(ids: np.ndarray, tokens: np.ndarray, experts: int) -> Visited:
    """Counts the experts `[L_sparse, M, k]` that M tokens with ids `[M]` visit, of `experts` in a layer."""
    return Visited(count_paths(ids, experts), count_tokens(ids, tokens, experts))


class TextPerplexity(Measure):
    """Nats per token of a text."""

    def __init__(self, cfg: ModelConfig, batches: Sequence[Batch], mesh: Mesh | None = None) -> None:
        """Compiles nothing yet.

        Args:
          cfg: a mixture.
          mesh: the devices, over which rows are divided; None: the default one.
        """
        self._cfg, self._batches = cfg, batches
        self.tokens = int(sum((batch.weights > 0).sum() for batch in batches))
        self._mesh = mesh or make_mesh(MeshShape(data=1), 1)
        self._nats = nats_step(cfg, self._mesh)

    def value(self, params: Params) -> float:
        """Nats per token."""
        return sum(float(self._on_rows(self._nats, params, batch)) for batch in self._batches) / self.tokens

    def visited(self, params: Params) -> Visited:
        """Counts the visits of experts by the text's tokens."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def visits(params: Params, batch: Any) -> jax.Array:
            inputs = params, batch.tokens, batch.starts
            _, routing = decoder.forward_documents_with_routing(*inputs, cfg=self._cfg, differentiable=False)
            return routing.ids

        route = jax.jit(visits, out_shardings=everywhere)
        read = [each.weights > 0 for each in self._batches]
        each_route = (np.asarray(self._on_rows(route, params, each)) for each in self._batches)
        ids = np.concatenate([found[:, where] for found, where in zip(each_route, read, strict=True)], axis=1)
        tokens = [np.asarray(each.tokens)[where] for each, where in zip(self._batches, read, strict=True)]
        return _visits(ids, np.concatenate(tokens), self._cfg.experts)

    def _on_rows(self, step: Callable[..., jax.Array], params: Params, batch: Batch) -> jax.Array:
        """Runs a step on a batch with rows divided over the mesh."""
        with jax.set_mesh(self._mesh):
            return step(params, jax.tree.map(lambda part: part[0], place_rows(batch, self._mesh, 1)))


def nats_step(cfg: ModelConfig, mesh: Mesh) -> Callable[[Params, Batch], jax.Array]:
    """The compiled step of (parameters, batch), both on the mesh, to the loss summed over the targets."""
    return jax.jit(functools.partial(_nats, cfg), out_shardings=NamedSharding(mesh, PartitionSpec()))


def _nats(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The loss of a batch, summed over its targets."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, differentiable=False)
    logits = decoder.logits(params, hidden, cfg=cfg)
    losses = next_token_losses(Outputs(params, hidden, logits, None, cfg), batch)
    return jnp.sum(jnp.where(batch.weights > 0, losses, jnp.zeros_like(losses)))


# While one expert is lowered, the others have these bits.
OTHERS = 4


class PairPerplexity(Measure):
    """Nats per token of the pairs' targets."""

    others = OTHERS

    def __init__(self, cfg: ModelConfig, rows: PairRows) -> None:
        """Compiles nothing yet; `rows` are the pairs."""
        self._batches = list(rows.held_out())
        self.tokens = int(sum(batch.weights.sum() for batch in self._batches))

        def nats(params: Any, batch: PairBatch) -> jax.Array:
            logits, _ = target_logits(params, batch, cfg=cfg)
            return jnp.sum(cross_entropy(logits, batch.targets) * batch.weights)

        self._nats = jax.jit(nats)

    def value(self, params: Params) -> float:
        """Nats per token."""
        return sum(float(self._nats(params, batch)) for batch in self._batches) / self.tokens


class PairRouge(Measure):
    """Mean Rouge-2 (F1) of greedy answers to the sources against the targets (see `Measure`)."""

    others = OTHERS

    def __init__(
        self, model: Translator, sources: Sequence[Sequence[int]], targets: Sequence[str], most_tokens: int
    ) -> None:
        """Uses the model's tokenizer and compiled steps.

        Args:
          model: the float model.
          sources: token ids of each.
          targets: reference answer of each.
          most_tokens: maximum number of tokens of an answer.

        Raises:
          ConfigError: `rouge-score` is not installed.
        """
        require_rouge()
        self._model, self._sources, self._targets, self._most = model, sources, targets, most_tokens

    def value(self, params: Params) -> float:
        """Mean Rouge-2, from 0 to 1."""
        floats: Any = params
        answers = self._model.translate(self._sources, self._most, params=floats)
        texts = (self._model.tokenizer.decode(each) for each in answers)
        pairs = zip(self._targets, texts, strict=True)
        return float(np.mean([rouge([target], text)["rouge2"] for target, text in pairs]))

    def loss(self, value: float, whole: float) -> float:
        """Returns the lost share of Rouge-2; negative if it grows."""
        if not whole:
            raise ConfigError(
                "the model's answers have no two words in a row in common with any target: it has not "
                "learned this task (is the --prefix that of its training?); measure by "
                "perplexity, or on other pairs"
            )
        return 1 - value / whole


@dataclasses.dataclass(frozen=True)
class PairVisits:
    """Visits of experts by pairs.

    Attributes:
      encoder: visits of the tokens of sources.
      decoder: visits of the tokens of targets.
      loads: `[L_sparse, E]`, the encoder's layers first: number of loads of each expert for a pair if none
        stays in memory. An encoder's is loaded once for all tokens of a source, a decoder's for each token
        of the target.
    """

    encoder: Visited
    decoder: Visited
    loads: np.ndarray


def pair_visits(cfg: ModelConfig, rows: PairRows, params: Params) -> PairVisits:
    """Counts the visits of experts by pairs in a model with these parameters."""
    assert cfg.encoder is not None
    of_encoder, experts = len(sparse_layers(cfg.encoder)), cfg.experts
    route: Callable[..., Any] = jax.jit(
        lambda params, batch: [each.ids for each in target_logits(params, batch, cfg=cfg)[1]]
    )
    sides: list[tuple[list[np.ndarray], list[np.ndarray]]] = [([], []), ([], [])]
    once = np.zeros((of_encoder, experts))
    for batch in rows.held_out():
        ids = [np.asarray(each) for each in route(params, batch)]
        # A row without a pair has no weights.
        real = batch.read_tokens * (batch.weights.sum(axis=1) > 0)
        read = np.arange(batch.read.shape[1]) < real[:, None]
        for side, layers, tokens, where in (
            (sides[0], ids[:of_encoder], batch.read, read),
            (sides[1], ids[of_encoder:], batch.tokens, batch.weights > 0),
        ):
            side[0].append(np.stack([each[where] for each in layers]))
            side[1].append(tokens[where])
        visits = np.stack(ids[:of_encoder])[..., 0, None] == np.arange(experts)
        once += (visits & read[..., None]).any(axis=2).sum(axis=1)
    encoder, decoder = (
        _visits(np.concatenate(ids, axis=1), np.concatenate(tokens), experts) for ids, tokens in sides
    )
    return PairVisits(encoder, decoder, np.concatenate([once, decoder.paths.alone]) / len(rows.pairs))
