"""Chooses formats of weights by bytes and loss, for `--weights auto`.

A plan is a format and the matrices that it stores at 8 bits besides its own. Plans are ordered by bytes:
4 bits everywhere, `int4`, then matrices of `int4` at 8 bits, those first whose errors cost most for their
bytes (`WIDENED`), layer by layer, at last `int8`. Within a number of bytes the largest plan is chosen, else
the smallest one whose loss is small enough.

The loss of a plan is the divergence of its predictions from those of the float weights on a text, in nats per
token: small ones are the relative growth of the perplexity. All plans are measured in one pass over the
checkpoint, with one layer in memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.layout import ALIGN, PAGE, contracted_axis
from jaxllm.bundle.writer import stored_form
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.formats import WeightFormat
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.decoder import embed_tokens, final_normed, layer_of_documents, logits
from jaxllm.models.input_squares import like_layer, unmeasured, with_input_squares
from jaxllm.models.parameters import head_name, param_specs, parameter_bits
from jaxllm.quant import QArray, as_floats, blocked_shapes
from jaxllm.quant.weights import Measured, RowParts

# Matrices of `int4` in the order in which they get 8 bits. Measured on SmolLM2-135M, each kind alone: the
# divergence at 4 bits for a megabyte more is 0.0022, 0.0016, 0.0016, 0.0010 and 0.0008 (`docs/results`).
WIDENED = ("down", "o", "up", "gate", "q")
# A function that reads the parameters as `prepare` does for a format, in the order of `param_specs`.
Source = Callable[[WeightFormat | None], Iterable[tuple[str, Any]]]
# A parameter as read for each format.
_ByFormat = dict[WeightFormat, Any]


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """A format of weights.

    Attributes:
      wide: names of matrices at 8 bits, of those that the format stores at 4.
    """

    weights: WeightFormat
    wide: frozenset[str] = frozenset()

    def bits(self, name: str, cfg: ModelConfig) -> int:
        """Bits of a parameter."""
        return 8 if name in self.wide else parameter_bits(name, param_specs(cfg)[name], self.weights)

    def parameter_bytes(self, name: str, cfg: ModelConfig) -> int:
        """Size of a parameter in a bundle, with padding."""
        spec, bits = param_specs(cfg)[name], self.bits(name, cfg)
        if bits > 8:
            return int(np.prod(spec.shape, dtype=np.int64)) * bits // 8 + ALIGN
        four = bits == 4
        data, scale = blocked_shapes(
            spec.shape, bits=bits, group=32 if four else 0, axis=contracted_axis(spec),
            minima=four and self.weights == "int4",
        )  # fmt: skip
        return int(np.prod(data)) + int(np.prod(scale)) * (2 if four else 4) + 2 * ALIGN

    def size_bytes(self, cfg: ModelConfig) -> int:
        """Size of all parameters in a bundle, with padding."""
        return sum(self.parameter_bytes(name, cfg) for name in param_specs(cfg)) + (cfg.layers + 4) * PAGE

    def described(self, cfg: ModelConfig) -> str:
        """The plan in words."""
        counts = {
            kind: len({name.split(".")[1] for name in self.wide if name.endswith(f".{kind}")})
            for kind in WIDENED
        }
        more = ", ".join(f"{kind} of {n} of {cfg.layers} layers" for kind, n in counts.items() if n)
        return self.weights + (f" with 8 bits for {more}" if more else "")

    def apply(self, params: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Parameters with the widths of this plan."""
        for name, value in params:
            if name in self.wide and not isinstance(value, QArray):
                yield name, Measured(value.value if isinstance(value, Measured) else value, bits=8)
            else:
                yield name, value


def plans(cfg: ModelConfig, *, by_layer: bool = True) -> list[WeightPlan]:
    """All plans by size; only those that treat all layers alike without `by_layer`."""
    wide: list[str] = []
    found = [WeightPlan("int4-all"), WeightPlan("int4")]
    specs = param_specs(cfg)
    for kind in WIDENED:
        for name, spec in specs.items():
            if name.endswith(f".{kind}") and spec.role != "vector" and ".experts." not in name:
                wide.append(name)
                if by_layer:
                    found.append(WeightPlan("int4", frozenset(wide)))
        found.append(WeightPlan("int4", frozenset(wide)))
    found = list(dict.fromkeys(found))
    return [*found, WeightPlan("int8")]


def plan_of_size(cfg: ModelConfig, most_bytes: int, *, or_smallest: bool = False) -> WeightPlan:
    """The largest plan whose parameters have at most `most_bytes`; `or_smallest` if there is none.

    Raises:
      ConfigError: none is that small.
    """
    found = plans(cfg)
    least = found[0].size_bytes(cfg)
    if least > most_bytes and or_smallest:
        return found[0]
    if least > most_bytes:
        raise ConfigError(
            f"the smallest weights, int4-all, take {least / 1e6:.1f} MB, and {most_bytes / 1e6:.1f} MB are "
            "left for them; allow more bytes (--max-size), or take a smaller model"
        )
    return [each for each in found if each.size_bytes(cfg) <= most_bytes][-1]


def plan_of_loss(
    source: Source, cfg: ModelConfig, tokens: Sequence[int], held_out: Sequence[int], max_loss: float
) -> tuple[WeightPlan, float]:
    """The smallest plan with at most `max_loss`, and its loss; for the arguments see `losses`. int8 if all
    others lose more."""
    chosen = plans(cfg, by_layer=False)
    for plan, loss in zip(chosen, losses(source, cfg, chosen, tokens, held_out), strict=True):
        if loss <= max_loss or plan is chosen[-1]:
            return plan, loss
    raise AssertionError


def losses(
    source: Source,
    cfg: ModelConfig,
    of: Sequence[WeightPlan],
    tokens: Sequence[int],
    held_out: Sequence[int],
) -> list[float]:
    """Divergences of plans from the float weights, in nats per token.

    Args:
      tokens: ids of a text by which matrices are quantized (see `with_input_squares`).
      held_out: ids of the text on which plans are measured, at most a window of them.

    Raises:
      ConfigError: the model cannot be measured.
    """
    if (reason := unmeasured(cfg)) is not None:
        raise ConfigError(f"{reason}: weights are not chosen by loss; name them (--weights int4)")
    formats: list[WeightFormat] = list(dict.fromkeys(plan.weights for plan in of))
    wide = with_input_squares(source("f32"), cfg, tokens)
    streams = _Streams(cfg, of, np.asarray(held_out, np.int32))
    own: dict[str, tuple[Any, _ByFormat]] = {}
    layer = -1
    for (name, value), *others in zip(wide, *map(source, formats), strict=True):
        by_format: _ByFormat = {form: each for form, (_, each) in zip(formats, others, strict=True)}
        number = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if number != layer and layer >= 0:
            streams.run(layer, own)
            own = {}
        layer = number
        if name == "embed.tokens":
            streams.embed(value, by_format)
        elif name == "head" and not cfg.head_bias:
            streams.predict(value, by_format)
        elif number < 0:
            streams.outer[name] = np.asarray(value, np.float32)
        else:
            own[name] = value, by_format
    if layer >= 0:
        streams.run(layer, own)
    if cfg.tied_head or cfg.head_bias:
        # It comes before what it is used with.
        head = head_name(cfg)
        forms: list[WeightFormat] = ["f32", *formats]
        value, *others = (next(each for name, each in source(form) if name == head) for form in forms)
        streams.predict(value, dict(zip(formats, others, strict=True)))
    return [each.divergence() for each in streams.sums]


class _Streams:
    """Runs the float weights and plans over one document, side by side."""

    def __init__(self, cfg: ModelConfig, plans: Sequence[WeightPlan], tokens: np.ndarray) -> None:
        self._cfg, self._plans = cfg, plans
        self._ids, self._places = np.unique(tokens, return_inverse=True)
        self.outer: dict[str, np.ndarray] = {}
        self._rows: list[np.ndarray] = []
        # Hidden states `[1, T, D]`, of the float weights first.
        self._x: list[jax.Array] = []
        self._layer = jax.jit(functools.partial(layer_of_documents, cfg=cfg), static_argnames="layer")
        self._like: dict[object, int] = {}
        self.sums = [_Predictions(len(tokens)) for _ in plans]

    def embed(self, value: Any, by_format: _ByFormat) -> None:
        """Takes the rows of the embedding that the document needs."""
        self._rows = [self._taken(value, None)]
        taken = {form: self._taken(each, form) for form, each in by_format.items()}
        self._rows += [taken[plan.weights] for plan in self._plans]

    def _taken(self, value: Any, form: WeightFormat | None) -> np.ndarray:
        """Rows of the document's tokens in a format, as floats."""
        found, first = [], 0
        for part in value.parts if isinstance(value, RowParts) else (value,):
            count = part.shape[0]
            own = self._ids[(self._ids >= first) & (self._ids < first + count)] - first
            first += count
            if not own.size:
                continue
            rows = jax.tree.map(lambda array, own=own: array[own], part)
            found.append(as_floats(rows) if form is None else self._stored("embed.tokens", rows, form))
        return np.concatenate(found)

    def _stored(self, name: str, value: Any, form: WeightFormat) -> np.ndarray:
        """A parameter as a format stores it, as floats."""
        return as_floats(stored_form(name, value, param_specs(self._cfg)[name], form))

    def run(self, layer: int, own: dict[str, tuple[Any, _ByFormat]]) -> None:
        """Runs one layer."""
        cfg = self._cfg
        if not self._x:
            at = jnp.arange(len(self._places), dtype=jnp.int32)[None]
            tokens = jnp.asarray(self._places, jnp.int32)[None]
            outer = {name: jnp.asarray(each) for name, each in self.outer.items()}
            self._x = [
                embed_tokens(outer | {"embed.tokens": jnp.asarray(rows)}, tokens, at, cfg=cfg)
                for rows in self._rows
            ]
        like = self._like.setdefault(like_layer(cfg, layer), layer)
        names = {name: f"layers.{like}.{name.split('.', 2)[2]}" for name in own}
        known: dict[tuple[str, WeightFormat, int], jax.Array] = {}

        def of(plan: WeightPlan | None, name: str) -> jax.Array:
            value, by_format = own[name]
            if plan is None:
                return jnp.asarray(as_floats(value))
            key = name, plan.weights, plan.bits(name, cfg)
            if key not in known:
                mine = by_format[plan.weights]
                if not isinstance(mine, QArray):
                    squares = value.input_squares if isinstance(value, Measured) else None
                    mine = Measured(np.asarray(mine), squares, key[2] if key[2] == 8 else 0)
                known[key] = jnp.asarray(self._stored(name, mine, plan.weights))
            return known[key]

        with without_native_kernels():
            for place, plan in enumerate([None, *self._plans]):
                params = {names[name]: of(plan, name) for name in own}
                self._x[place] = self._layer(params, self._x[place], layer=like)

    def predict(self, value: Any, by_format: _ByFormat) -> None:
        """Predicts with the rows of the head, part by part."""
        cfg, first, head = self._cfg, 0, head_name(self._cfg)
        outer = {name: jnp.asarray(each) for name, each in self.outer.items()}
        hidden = [final_normed(outer, x, cfg=cfg)[0] for x in self._x]
        columns = [value, *by_format.values()]
        parts = [each.parts if isinstance(each, RowParts) else (each,) for each in columns]
        for wide, *others in zip(*parts, strict=True):
            rows: dict[WeightFormat | None, np.ndarray] = {None: as_floats(wide)}
            for form, each in zip(by_format, others, strict=True):
                rows[form] = self._stored(head, each, form)
            last = first + len(rows[None])
            bias = {}
            if "head_bias" in outer:
                bias["head_bias"] = outer["head_bias"][first:last]
            of = [rows[None], *(rows[plan.weights] for plan in self._plans)]
            scores = [
                np.asarray(logits({head: jnp.asarray(each)} | bias, x, cfg=cfg))
                for each, x in zip(of, hidden, strict=True)
            ]
            for sums, mine in zip(self.sums, scores[1:], strict=True):
                sums.add(scores[0], mine)
            first = last


class _Predictions:
    """Sums over a vocabulary, added part by part, of two predictions' divergence.

    With logits a and b: sum(p · (a - b)) - log(sum(exp(a))) + log(sum(exp(b))), where p = softmax(a).
    """

    def __init__(self, tokens: int) -> None:
        self._most = np.full((2, tokens), -np.inf, np.float32)
        self._sum = np.zeros((2, tokens), np.float64)
        self._moved = np.zeros(tokens, np.float64)

    def add(self, theirs: np.ndarray, mine: np.ndarray) -> None:
        """Adds a part of the vocabulary: logits `[T, part]`."""
        most = np.maximum(self._most, [theirs.max(-1), mine.max(-1)])
        less = np.exp(self._most - most)
        shares = np.exp(theirs - most[0][:, None])
        self._moved = self._moved * less[0] + (shares * (theirs - mine)).sum(-1)
        self._sum = self._sum * less
        self._sum[0] += shares.sum(-1)
        self._sum[1] += np.exp(mine - most[1][:, None]).sum(-1)
        self._most = most

    def divergence(self) -> float:
        """Its mean over the tokens, in nats."""
        whole = np.log(self._sum) + self._most
        return float(np.mean(self._moved / self._sum[0] - whole[0] + whole[1]))
