"""Calibrates how contexts of a model are stored, and writes the bundle with the choice.

See `jaxllm.kv.calibration` for what is chosen, and `context_errors` for how it is measured.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.contexts import contexts_parts
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.kv.calibration import Candidate, ContextCalibration, choose, kept_shares
from jaxllm.kv.chunks import CHUNK_TOKENS, chunk_shapes
from jaxllm.kv.codecs import CODECS
from jaxllm.models.rooms import require_decoder_alone, require_room
from training.bundle_output import require_folder_of
from training.calibrate.context_errors import context_errors
from training.calibrate.tokens import text_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextRecipe:
    """Sizes of a calibration.

    Attributes:
      tokens: of text to measure on.
      row_tokens: longest context.
      sensitivity_rows: of so many contexts sensitivities are measured, which takes a forward pass per layer.
      chunk_tokens: lengths of chunks to choose from.
      ratio: bytes of chunks that codecs are compared at (see `ContextOptions.ratio`).
    """

    tokens: int = 2048
    row_tokens: int = 512
    sensitivity_rows: int = 2
    chunk_tokens: tuple[int, ...] = (CHUNK_TOKENS,)
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not self.chunk_tokens or not all(1 <= each <= 256 for each in self.chunk_tokens):
            raise ConfigError(f"chunks have 1 to 256 tokens, got {self.chunk_tokens}")
        longest = max(self.chunk_tokens)
        if any(longest % each for each in self.chunk_tokens):
            raise ConfigError(f"lengths of chunks must divide the longest, got {self.chunk_tokens}")
        if min(self.tokens, self.row_tokens) < 2 * longest:
            raise ConfigError(
                f"measure on contexts of at least two chunks, {2 * longest} tokens, got tokens {self.tokens} "
                f"and row_tokens {self.row_tokens}"
            )
        if self.sensitivity_rows < 1:
            raise ConfigError(f"sensitivity_rows must be from 1 up, got {self.sensitivity_rows}")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"ratio must be above 0 and at most 1, got {self.ratio}")


def calibrate_contexts(
    recipe: ContextRecipe,
    model: Path,
    out: Path,
    *,
    texts: Sequence[Path] = (),
    name: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Makes a bundle that says how its contexts are best stored.

    Args:
      recipe: sizes of the calibration.
      model: a bundle.
      out: the new bundle's path; written whole or not at all.
      texts: files to measure on; Python's language reference if there are none.
      name: the model's name, for people; its own by default.
      console: where progress goes; the terminal's error stream by default.

    Returns:
      What was found: the choice, by candidate what is lost at the ratio and kept by width, and sensitivities.

    Raises:
      ConfigError: there is too little text, or no codec takes as little as the ratio.
      CheckpointError: the model cannot be read.
    """
    console, model, out = console or Console(stderr=True), Path(model), Path(out)
    require_folder_of(out)
    if model.is_dir():
        raise CheckpointError(
            f"{model} is a folder; make a bundle of it first: jaxllm prepare {model} -o FILE"
        )
    with Bundle.open(model) as bundle:
        require_room(bundle.cfg, "contexts")
        if bundle.cfg.states is not None:
            raise ConfigError(
                f"contexts of {bundle.cfg.model_type} are kept as they are, with their states: there is no "
                "codec to choose; serve the model without a calibration"
            )
        require_decoder_alone(bundle.cfg, "calibration of contexts", "services keep its contexts without one")
        rows = _rows(bundle, recipe, texts)
        params = jax.tree.map(jnp.asarray, bundle.load())
        candidates = [Candidate(codec, size) for size in recipe.chunk_tokens for codec in CODECS]
        with console.status("measuring") as status:
            errors, sensitivity = context_errors(
                bundle.cfg,
                params,
                rows,
                candidates,
                sensitivity_rows=recipe.sensitivity_rows,
                progress=lambda done, total: status.update(f"measuring, layer {done} of {total}"),
            )
        shapes = chunk_shapes(bundle.cfg, dtype="float32")
        chosen, lost = choose(errors, sensitivity, shapes, recipe.ratio)
        calibration = ContextCalibration(chosen=chosen, errors=errors, sensitivity=sensitivity)
        facts = {"ratio": recipe.ratio, "tokens": sum(map(len, rows))}
        rewrite_bundle(out, bundle, contexts_parts(calibration, facts), name=name)
    return {
        **facts,
        "codec": chosen.codec,
        "chunk_tokens": chosen.chunk_tokens,
        "lost": {_named(each): _rounded(share) for each, share in lost.items() if np.isfinite(share)},
        "kept": {
            _named(each): {
                str(bits): round(share, 6) for bits, share in kept_shares(own, sensitivity).items()
            }
            for each, own in errors.items()
        },
        "sensitivity": {
            part: [_rounded(each) for each in sensitivity[:, place].tolist()]
            for place, part in enumerate(("keys", "values"))
        },
    }


def _named(candidate: Candidate) -> str:
    return f"{candidate.codec}, {candidate.chunk_tokens} tokens"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _rows(bundle: Bundle, recipe: ContextRecipe, paths: Sequence[Path]) -> list[np.ndarray]:
    """Contexts of equal length."""
    longest = max(recipe.chunk_tokens)
    length = min(recipe.row_tokens, bundle.cfg.window_tokens) // longest * longest
    tokens = text_tokens(bundle, recipe.tokens, paths)
    count = min(recipe.tokens, len(tokens)) // length if length else 0
    if not count:
        raise ConfigError(
            f"{len(tokens)} tokens of text are too few for contexts of {length or longest}; give more "
            "(--text), or shorter chunks (--chunk-tokens)"
        )
    return [np.array(tokens[place * length : (place + 1) * length], np.int32) for place in range(count)]
