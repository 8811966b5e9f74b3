"""Prepares bundles from Hugging Face folders and GGUF files, and from a mixture's bundle one with its experts
stored separately."""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bundle import Bundle, Part, WeightFormat, lay_experts_apart, write_bundle
from jaxllm.bundle.images import StoredImageEncoder, image_encoder_parts
from jaxllm.bundle.kit import Kit
from jaxllm.bundle.layout import PAGE
from jaxllm.bundle.writer import Kept
from jaxllm.checkpoints.encoder_folders import has_images, read_image_encoder, read_image_input
from jaxllm.checkpoints.gguf_file import is_gguf
from jaxllm.checkpoints.huggingface import Checkpoint
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.formats import AUTO, WEIGHT_FORMATS, WeightChoice
from jaxllm.models.features import require_feature
from jaxllm.models.input_squares import unmeasured, with_input_squares
from jaxllm.models.parameters import param_specs, parameter_count, sparse_layers
from jaxllm.quant import QArray
from jaxllm.quant.weights import RowParts
from jaxllm.text.builtin_texts import builtin_texts
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from jaxllm.weight_choice import Source, WeightPlan, losses, plan_of_loss, plan_of_size

Progress = Callable[[str, int, int], None]
_Stored = np.ndarray | QArray | RowParts


# Tokens of text by which matrices of 4 bits are quantized, and on which a choice of weights is measured.
_TOKENS, _HELD_OUT_TOKENS, _LEAST_TOKENS = 2048, 512, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightRecipe:
    """How matrices of floats are quantized.

    Attributes:
      weights: format of matrices; "auto" chooses one, and None keeps the checkpoint's own.
      texts: texts by which matrices of 4 bits are quantized; Python's language reference if empty.
      most_bytes: size of the bundle, of which "auto" uses as much as it can; 0 for the smallest bundle with
        at most `max_loss`.
      max_loss: largest loss that "auto" accepts, in nats per token, about the relative growth of the
        perplexity.
      or_smallest: whether "auto" takes the smallest weights if none have `most_bytes`, instead of an error.
    """

    weights: WeightChoice | None = None
    texts: tuple[str, ...] = ()
    most_bytes: int = 0
    max_loss: float = 0.01
    or_smallest: bool = False

    def __post_init__(self) -> None:
        if self.weights not in (None, AUTO, *WEIGHT_FORMATS):
            raise ConfigError(
                f"weights must be one of {', '.join(WEIGHT_FORMATS)} or {AUTO}, got {self.weights!r}"
            )
        if self.most_bytes < 0 or not 0 < self.max_loss < float("inf"):
            raise ConfigError(
                f"a size is at least 0 and a loss above it, got {self.most_bytes} and {self.max_loss}"
            )


@dataclasses.dataclass(frozen=True)
class ChosenWeights:
    """Weights that were chosen.

    Attributes:
      description: format, and kinds of matrices with more bits.
      loss: divergence from the float weights, in nats per token, on a text that was not used before.
      tokens: number of tokens of that text.
    """

    description: str
    loss: float
    tokens: int

    @property
    def in_words(self) -> str:
        """One line about the choice."""
        return (
            f"chosen: {self.description}; loses {self.loss:.4f} nats per token (about "
            f"{100 * math.expm1(self.loss):+.1f} % perplexity) on {self.tokens} tokens of text"
        )


def prepare(
    model: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    weights: WeightChoice | WeightRecipe | None = None,
    name: str = "",
    ignore_keys: Collection[str] = (),
    expert_bits: int | np.ndarray = 0,
    parts: Mapping[str, Part] | Kit | None = None,
    progress: Progress | None = None,
) -> ChosenWeights | None:
    """Writes a model as the bundle `out`, one tensor in memory at a time; for a SmolVLM folder with a
    `preprocessor_config.json` including its image encoder.

    Args:
      model: folder with config.json, safetensors and a tokenizer, or its `Checkpoint`; or the path of a GGUF
        file; or, with `expert_bits`, the path of a mixture's bundle, of which only experts that get fewer
        bits are converted.
      out: path of the bundle, which is written atomically.
      weights: format of matrices, or a recipe; None keeps the checkpoint's (float16 becomes f32). For a GGUF
        file None keeps each matrix's own, and its quantized blocks bit for bit if ours have the same format.
      name: the model's display name; the folder's or file's name by default.
      ignore_keys: keys of the config to ignore: unknown ones, and ones with unsupported values.
      expert_bits: bit width of separately stored experts, one for all or `[L_sparse, E]` (see
        `write_bundle`), so that the model runs in less memory; 0 stores experts together, in the format
        `weights`.
      parts: additions to the model, by name; or a kit that makes it elastic: its units are put in order, and
        so quantized anew, at 8 bits if the checkpoint is quantized and `weights` is None.

    Returns:
      The weights that were chosen for "auto", None for others.

    Raises:
      CheckpointError, ConfigError: the folder's model is missing, malformed or unsupported.
    """
    recipe = weights if isinstance(weights, WeightRecipe) else WeightRecipe(weights=weights)
    weights = recipe.weights
    folder, out = Path(model.folder if isinstance(model, Checkpoint) else model), Path(out)
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder; create it first")
    if out.is_dir():
        raise CheckpointError(f"{out} is a folder; name the bundle's file, such as {out / 'model.jaxllm'}")
    if out.resolve().parent == folder.resolve() and out.suffix in (".safetensors", ".json", ".jinja"):
        raise CheckpointError(f"{out} would replace a file of the model itself; name another file")
    kit = parts if isinstance(parts, Kit) else None
    apart, parts = bool(np.any(expert_bits)), {} if isinstance(parts, Kit) else dict(parts or {})
    if folder.is_file() and not is_gguf(folder):
        with Bundle.open(folder) as bundle:
            own, cfg = bundle.layout.weights, bundle.cfg
            if not apart:
                raise CheckpointError(
                    f"{folder} is a bundle; of a mixture, name --expert-bits to lay its separate experts"
                )
            if weights not in (None, own) or ignore_keys:
                raise CheckpointError(
                    f"{folder} is a bundle of {own} weights, which stay as they are; for others give the "
                    "Hugging Face folder that it was made of"
                )
            lay_experts_apart(out, bundle, _widths(cfg, expert_bits), parts, name=name)
            return None
    if out.exists() and folder.is_file() and out.samefile(folder):
        raise CheckpointError(f"{out} is the model itself; name another file")
    if folder.is_file():
        from jaxllm.checkpoints.gguf_config import read_gguf_config
        from jaxllm.checkpoints.gguf_file import read_gguf
        from jaxllm.checkpoints.gguf_model import own_format, read_gguf_params, stays_at_4_bits
        from jaxllm.checkpoints.gguf_tokenizer import read_gguf_tokenizer

        file, quantized, keeps = read_gguf(folder), True, not weights
        cfg = read_gguf_config(file, ignore_keys=ignore_keys)
        tokenizer = read_gguf_tokenizer(file, cfg.vocab_size)

        def of_file(form: WeightFormat | None) -> Iterator[tuple[str, Any]]:
            return read_gguf_params(file, cfg, form, by_rows=True)

        source: Source = of_file
        form, floats = weights or own_format(file), not keeps and not stays_at_4_bits(file, weights)
        arrays: Callable[[], Iterator[tuple[str, Any]]] = functools.partial(
            read_gguf_params, file, cfg, "f32"
        )
    else:
        checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(folder, ignore_keys=ignore_keys)
        cfg, tokenizer, own = checkpoint.cfg, checkpoint.tokenizer, checkpoint.weight_format
        quantized, form = checkpoint.quantization is not None, weights or own
        # Whether floats keep their width next to quantized matrices.
        keeps = quantized and not weights
        floats = not quantized or form != own
        if quantized and form == AUTO:
            raise CheckpointError(
                f"{folder} is quantized already: keep its weights (no --weights), or name a format"
            )

        def of_folder(form: WeightFormat | None) -> Iterator[tuple[str, Any]]:
            if quantized and form not in (None, own):
                return checkpoint.params()
            return checkpoint.stored_params(by_rows=True)

        source, arrays = of_folder, checkpoint.params
        if has_images(checkpoint):
            images, values = read_image_encoder(checkpoint)
            try:
                found = StoredImageEncoder(cfg=images, input=read_image_input(checkpoint), params=values)
            except ConfigError as error:
                raise CheckpointError(f"{folder}: {error}") from error
            parts = {**image_encoder_parts(found), **parts}
    if apart and kit is not None:
        raise CheckpointError(
            f"{folder}: experts of a model with levels are stored together; give --expert-bits or a kit"
        )
    if apart and quantized:
        raise CheckpointError(
            f"{folder}: experts of quantized checkpoints are stored separately in a second step: prepare it "
            "without --expert-bits, then the bundle with them"
        )
    if apart:
        require_feature(cfg, "separate experts")
    if kit is not None:
        # Units in another order are quantized anew.
        keeps, floats, form = False, True, weights or ("int8" if quantized else form)
        source, parts = lambda _: kit.ordered(cfg, arrays()), {**parts, **kit.parts}
    total, chosen, plan = parameter_count(cfg), None, None
    if form == AUTO:
        if apart:
            raise CheckpointError(f"experts have the widths of --expert-bits: name --weights, not {AUTO}")

        def watched(form: WeightFormat | None) -> Iterator[tuple[str, Any]]:
            done = 0
            for param, value in source(form):
                yield param, value
                done += math.prod(value.shape)
                # All are read side by side, the floats once.
                if progress is not None and form == "f32" and param.startswith("layers."):
                    progress("measure", done, total)

        plan, chosen = _chosen(watched, cfg, tokenizer, parts, recipe)
        form = plan.weights
        parts["chosen_weights"] = Part(facts=dataclasses.asdict(chosen), arrays={})
    params = source(None if keeps else form)
    if floats and form in ("int4", "int4-all") and unmeasured(cfg) is None:
        params = with_input_squares(params, cfg, _text_tokens(tokenizer, cfg, recipe.texts)[0])
    if plan is not None:
        params = plan.apply(params)

    def counted() -> Iterator[tuple[str, _Stored | Kept]]:
        done = 0
        for param, value in params:
            yield param, _kept(value) if keeps else value
            done += math.prod(value.shape)
            if progress is not None:
                progress("prepare", done, total)

    try:
        write_bundle(
            out,
            cfg=cfg,
            params=counted(),
            weights=form,
            tokenizer=tokenizer,
            name=name or model_name(folder),
            parts=parts,
            expert_bits=_widths(cfg, expert_bits) if apart else None,
        )
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return chosen


def _chosen(
    source: Source,
    cfg: ModelConfig,
    tokenizer: TokenizerFiles,
    parts: Mapping[str, Part],
    recipe: WeightRecipe,
) -> tuple[WeightPlan, ChosenWeights]:
    """The plan for "auto", and what it costs."""
    tokens, held_out = _text_tokens(tokenizer, cfg, recipe.texts)
    if recipe.most_bytes:
        # Besides the weights there are the tokenizer and the manifest, some hundred bytes for each parameter.
        beside = len(json.dumps(tokenizer.to_json())) + 400 * len(param_specs(cfg)) + 2 * PAGE
        beside += sum(each.nbytes for part in parts.values() for each in part.arrays.values())
        plan = plan_of_size(cfg, recipe.most_bytes - beside, or_smallest=recipe.or_smallest)
        (loss,) = losses(source, cfg, [plan], tokens, held_out)
    else:
        plan, loss = plan_of_loss(source, cfg, tokens, held_out, recipe.max_loss)
    return plan, ChosenWeights(plan.described(cfg), loss, len(held_out))


def _text_tokens(
    tokenizer: TokenizerFiles, cfg: ModelConfig, texts: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Ids of the text to quantize by, and of the text to measure on, which follows it."""
    encoder, tokens = Tokenizer(tokenizer), list[int]()
    for text in texts or builtin_texts():
        # Some tokenizers have more entries than the embedding has rows.
        tokens += [each for each in encoder.encode(text) if each < cfg.vocab_size]
        if len(tokens) >= _TOKENS + _HELD_OUT_TOKENS:
            break
    if len(tokens) < _LEAST_TOKENS:
        raise ConfigError(
            f"quantize by at least {_LEAST_TOKENS} tokens of text, got {len(tokens)}; give more (--text)"
        )
    held_out = min(_HELD_OUT_TOKENS, cfg.window_tokens, len(tokens) // 5)
    tokens = tokens[: _TOKENS + held_out]
    return tokens[:-held_out], tokens[-held_out:]


def model_name(path: Path) -> str:
    """Display name of a model: that of its file or folder; in Hugging Face's cache, where folders are named
    by commits, that of the repository."""
    if path.is_file():
        return path.stem
    path = path.resolve()
    repository = path.parent.parent.name
    in_cache = path.parent.name == "snapshots" and repository.startswith("models--")
    return repository.rpartition("--")[2] if in_cache else path.name


def _kept(value: _Stored) -> _Stored | Kept:
    """A parameter whose floats keep their width next to quantized ones."""
    if isinstance(value, RowParts):
        return value.map(_kept)
    return value if isinstance(value, QArray) else Kept(value)


def _widths(cfg: ModelConfig, expert_bits: int | np.ndarray) -> np.ndarray:
    return np.broadcast_to(expert_bits, (len(sparse_layers(cfg)), cfg.experts))
