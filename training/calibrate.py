"""From a mixture, a Hugging Face folder or a bundle, to a bundle whose experts have the widths they deserve.

EdgeMoE (arXiv 2308.14352, section 3.2): experts are lowered one by one on a calibration text to see what each
matters, then as many as the tolerable loss allows (`jaxllm.experts.bitwidth`). A loss is how much the
perplexity grows, as a share of that of the float model, or of what a bundle's weights stand for. The same
text gives the statistics of activation paths. All other weights stay as they are; what another width of
theirs costs is not counted. Of a bundle experts get narrower, never wider, and who keeps its width is not
changed.

A run's folder holds `recipe.json`, `tokens/` and `losses.json`, every loss that was measured: the same
command goes on where it was, and another tolerable loss measures little anew.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress as ProgressBar

from jaxllm.bundle import EXPERT_BITS, Bundle, WeightFormat, expert_widths
from jaxllm.bundle.experts import expert_parts
from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.experts.activation_paths import PathCounts, count_paths
from jaxllm.experts.bitwidth import WidthPlan, search_widths
from jaxllm.experts.token_experts import TokenExperts, count_tokens
from jaxllm.input_files import read_text
from jaxllm.models import decoder
from jaxllm.models.parameters import Params, param_specs
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize, quantize
from training.corpus import TokenizedDocuments, write_tokens
from training.documents import builtin_texts, documents_digest, read_texts, text_document
from training.encoders import ModelEncoder
from training.lora import FrozenModel
from training.losses import next_token_losses
from training.packing import Batch, evaluation_batches
from training.run_files import claimed, write_json

# Of less text than this, chance decides who matters.
LEAST_TOKENS = 2048
_LOSSES_FILE = "losses.json"
_PARTS = ("gate", "up", "down")
_LOWEST = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationRecipe:
    """What is measured.

    Attributes:
      tokens: of text to calibrate on; as many more are held out, to say what the widths cost there.
      row_tokens: longest context.
      batch: rows that are computed together.
    """

    tokens: int = 8192
    row_tokens: int = 256
    batch: int = 4

    def __post_init__(self) -> None:
        if self.tokens < LEAST_TOKENS:
            raise ConfigError(f"calibrate on at least {LEAST_TOKENS} tokens, got {self.tokens}")
        if self.row_tokens < 2 or self.batch < 1:
            raise ConfigError(f"rows of {self.row_tokens} tokens, {self.batch} at a time, measure nothing")

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CalibrationRecipe":
        """Read what `to_json` wrote."""
        return cls(**data)


def calibrate(
    recipe: CalibrationRecipe,
    model: Path,
    out: Path,
    run_dir: Path,
    *,
    most_loss: float = 0.05,
    texts: Sequence[Path] = (),
    weights: WeightFormat | None = None,
    uniform: int = 0,
    name: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Makes a bundle with experts apart, or goes on with the run in `run_dir`.

    Args:
      recipe: what is measured.
      model: a mixture of experts: a Hugging Face folder, or a bundle.
      out: the bundle's path; written whole or not at all.
      run_dir: the run's folder, made if missing.
      most_loss: tolerable growth of the perplexity, as a share of it.
      texts: files to calibrate on; Python's language reference if there are none.
      weights: width of all other matrices; None keeps the checkpoint's own, as a bundle always does.
      uniform: one width for all experts, of `EXPERT_BITS`, instead of a search; 0 searches.
      name: the model's name, for people; the folder's own by default.
      console: where progress goes; the terminal's error stream by default.

    Returns:
      What was found: bounds, how many experts are lowered, losses on both texts, bytes of experts.

    Raises:
      ConfigError: the model has no experts, there is too little text, no widths lose so little, or `run_dir`
        belongs to another run.
      CheckpointError: the model cannot be read.
    """
    console, run_dir, out, model = console or Console(stderr=True), Path(run_dir), Path(out), Path(model)
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder; create it first")
    if not model.exists():
        raise CheckpointError(f"{model}: no such file or folder; give a Hugging Face folder or a bundle")
    if uniform and uniform not in EXPERT_BITS:
        raise ConfigError(f"experts have a width among {EXPERT_BITS}, got {uniform}")
    frozen = FrozenModel.read(model, None if model.is_dir() else weights)
    if not frozen.cfg.experts:
        raise ConfigError(f"{model} is no mixture of experts; `jaxllm prepare` makes its bundle")
    own = _own_widths(model, frozen.cfg, uniform)
    floats = {name: dequantize(each, jnp.dtype(jnp.float32)) for name, each in frozen.params.items()}
    documents = [text_document(text) for path in texts for text in read_texts(path)]
    documents = documents or [text_document(text) for text in builtin_texts()]
    digest = documents_digest(each.digest() for each in documents)
    with claimed(run_dir, recipe, model=frozen.fingerprint(), documents=digest):
        if not (run_dir / "tokens").exists():
            encoder = ModelEncoder(frozen.tokenizer)
            write_tokens(run_dir / "tokens", ((0, each) for each in documents), encoder)
    batches, held_out = _split(TokenizedDocuments.read(run_dir / "tokens"), recipe)

    text = WidthLosses(frozen.cfg, floats, batches, run_dir / _LOSSES_FILE)
    counts, of_tokens, shares = text.paths()
    if uniform:
        bits = np.full(shares.shape, uniform, np.int8)
        facts: dict[str, Any] = {"uniform": uniform}
    else:
        plan = _search(text, shares, most_loss, console)
        bits = np.minimum(plan.bits, own).astype(np.int8)
        facts = {
            "most_loss": most_loss,
            "lower": plan.lower,
            "upper": plan.upper,
            "lowered": plan.lowered,
        }
    unseen = WidthLosses(frozen.cfg, floats, held_out, run_dir / f"held_out_{_LOSSES_FILE}")
    facts |= {
        "experts": int(bits.size),
        "loss": round(text.loss_of(bits), 5),
        "held_out_loss": round(unseen.loss_of(bits), 5),
        "perplexity": round(math.exp(text.whole), 4),
        "held_out_perplexity": round(math.exp(unseen.whole), 4),
        "tokens": text.tokens,
    }
    parts = expert_parts(counts, facts, of_tokens)
    prepare(model, out, weights=weights, name=name, expert_bits=bits, parts=parts)
    widths, number = np.unique(bits, return_counts=True)
    return {**facts, "widths": {str(width): int(each) for width, each in zip(widths, number, strict=True)}}


def _own_widths(model: Path, cfg: ModelConfig, uniform: int) -> np.ndarray:
    """The widths `[L_sparse, E]` that experts have, 32 in a folder."""
    if model.is_dir():
        return np.full((sum(map(cfg.is_sparse, range(cfg.layers))), cfg.experts), 32, np.int8)
    with Bundle.open(model) as bundle:
        own = expert_widths(bundle)
    if np.any(uniform > own):
        raise ConfigError(
            f"{model} has experts of {int(own.min())} bits, and {uniform} would be larger, not better; give "
            "no more, or the Hugging Face folder"
        )
    return own


class WidthLosses:
    """What widths of experts lose on a text, measured once each.

    Attributes:
      tokens: that are predicted.
    """

    def __init__(self, cfg: ModelConfig, params: Params, batches: Sequence[Batch], path: Path) -> None:
        """Measures nothing yet.

        Args:
          cfg: a mixture.
          params: as floats of 32 bits.
          batches: the text.
          path: of the file with what was measured before.
        """
        self._cfg, self._params, self._batches, self._path = cfg, params, batches, path
        self.tokens = int(sum((batch.weights > 0).sum() for batch in batches))
        self._layers = [layer for layer in range(cfg.layers) if cfg.is_sparse(layer)]
        self._known: dict[str, float] = _read_losses(path)
        self._narrow: dict[tuple[int, str], np.ndarray] = {}
        self._nats = jax.jit(functools.partial(_nats, cfg))

    @property
    def shape(self) -> tuple[int, int]:
        """`(L_sparse, E)`."""
        return len(self._layers), self._cfg.experts

    @property
    def whole(self) -> float:
        """Nats per token of the float model."""
        return self._measured("whole", lambda: self._params)

    def loss_of(self, bits: np.ndarray) -> float:
        """The growth of the perplexity, as a share, by widths `[L_sparse, E]`; 32 changes nothing."""
        bits = np.asarray(bits, np.int8)
        key = hashlib.sha256(bits.tobytes()).hexdigest()[:16]
        return math.exp(self._measured(key, lambda: self._with_widths(bits)) - self.whole) - 1

    def importance(self, report: Callable[[int, int], None]) -> np.ndarray:
        """What is lost when an expert alone has the narrowest width, `[L_sparse, E]`.

        `report` is called with (experts done, experts in all).
        """
        found = np.zeros(self.shape)
        for done, at in enumerate(np.ndindex(*self.shape), start=1):
            alone = np.full(self.shape, 32, np.int8)
            alone[at] = _LOWEST
            found[at] = self.loss_of(alone)
            report(done, found.size)
        return found

    def paths(self) -> tuple[PathCounts, TokenExperts, np.ndarray]:
        """The activation paths of the text, the experts of its tokens, and of each layer the experts' shares
        `[L_sparse, E]`."""
        route = jax.jit(functools.partial(_visited, self._cfg))
        read = [each.weights > 0 for each in self._batches]
        each_route = (np.asarray(route(self._params, each)) for each in self._batches)
        ids = np.concatenate([found[:, where] for found, where in zip(each_route, read, strict=True)], axis=1)
        tokens = [np.asarray(each.tokens)[where] for each, where in zip(self._batches, read, strict=True)]
        counts = count_paths(ids, self._cfg.experts)
        of_tokens = count_tokens(ids, np.concatenate(tokens), self._cfg.experts)
        return counts, of_tokens, counts.alone / counts.alone.sum(-1, keepdims=True)

    def _measured(self, key: str, params: Callable[[], Params]) -> float:
        if key not in self._known:
            params_now = params()
            total = sum(float(self._nats(params_now, batch)) for batch in self._batches)
            if not math.isfinite(total):
                raise ConfigError("the model's loss on the calibration text is not finite; it is broken")
            self._known[key] = total / self.tokens
            write_json(self._path, self._known)
        return self._known[key]

    def _with_widths(self, bits: np.ndarray) -> Params:
        changed: dict[str, Any] = {}
        for layer, widths in zip(self._layers, bits, strict=True):
            if np.all(widths == 32):
                continue
            for part in _PARTS:
                name = f"layers.{layer}.experts.{part}"
                stack = np.array(self._params[name], np.float32)
                for width in np.unique(widths[widths < 32]):
                    chosen = widths == width
                    stack[chosen] = self._at(int(width), name)[chosen]
                changed[name] = jnp.asarray(stack)
        return {**self._params, **changed}

    def _at(self, width: int, name: str) -> np.ndarray:
        """A stack of experts as it is at a width, as floats."""
        if (width, name) not in self._narrow:
            value = np.asarray(self._params[name], np.float32)
            if width == 16:
                self._narrow[width, name] = np.asarray(jnp.asarray(value).astype(jnp.bfloat16), np.float32)
            else:
                axis = contracted_axis(param_specs(self._cfg)[name])
                stored = quantize(value, bits=width, axis=axis)  # pyright: ignore[reportArgumentType]
                self._narrow[width, name] = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)))
        return self._narrow[width, name]


def _search(text: WidthLosses, shares: np.ndarray, most_loss: float, console: Console) -> WidthPlan:
    with ProgressBar(console=console, transient=True) as bar:
        task = bar.add_task("experts", total=shares.size)
        importance = text.importance(lambda done, total: bar.update(task, completed=done, total=total))
        task = bar.add_task("widths", total=None)

        def loss_of(bits: np.ndarray) -> float:
            bar.advance(task)
            return text.loss_of(bits)

        return search_widths(importance, shares, loss_of, most_loss=most_loss)


def _split(documents: TokenizedDocuments, recipe: CalibrationRecipe) -> tuple[list[Batch], list[Batch]]:
    """The batches to calibrate on, and those held out."""
    taken: tuple[list[Batch], list[Batch]] = ([], [])
    room = [recipe.tokens, recipe.tokens]
    for number, batch in enumerate(evaluation_batches(documents, recipe.row_tokens, recipe.batch)):
        # By turns, so that both are of all the text's kinds; what one has no room for the other takes.
        at = number % 2 if min(room) > 0 else int(room[0] <= 0)
        if max(room) <= 0:
            break
        taken[at].append(batch)
        room[at] -= int((batch.weights > 0).sum())
    if not taken[1] or max(room) > recipe.tokens - LEAST_TOKENS:
        raise ConfigError(
            f"the text has {len(documents.tokens)} tokens; calibrating and holding out take at least "
            f"{2 * LEAST_TOKENS}: give more text"
        )
    return taken


def _read_losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        return {key: float(value) for key, value in json.loads(read_text(path)).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; remove it, and it is made again") from error


def _nats(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The loss of a batch, summed over its targets."""
    hidden = decoder.forward_documents(params, batch.tokens, batch.starts, cfg=cfg, differentiable=False)
    losses = next_token_losses(decoder.logits(params, hidden, cfg=cfg), batch)
    return jnp.sum(jnp.where(batch.weights > 0, losses, jnp.zeros_like(losses)))


def _visited(cfg: ModelConfig, params: Params, batch: Any) -> jax.Array:
    """The experts `[L_sparse, B, T, k]` that tokens visit."""
    _, routing = decoder.forward_documents_with_routing(params, batch.tokens, batch.starts, cfg=cfg)
    return routing.ids
