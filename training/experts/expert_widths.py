"""Chooses a bitwidth for each expert of a mixture, and writes a bundle with separately stored experts.

EdgeMoE (arXiv 2308.14352, section 3.2): experts are lowered one by one on a calibration text to measure
their importance, then as many as the tolerable loss allows (`jaxllm.experts.bitwidth`). A loss is the
growth of the perplexity, as a share of that of the float model (for a bundle: of its dequantized weights).
The same text gives the statistics of activation paths. All other weights stay unchanged; the cost of
storing them narrower is not counted. Experts of a bundle only get narrower, and those that keep their width
are not changed.

EdgeMoE's own models, Switch Transformers, are measured on pairs of sources and targets: each expert of both
sides is lowered in turn, with the others at 4 bits. The loss is of the perplexity of the targets or of
Rouge-2; successions of experts are counted for each side.

A run's folder has `recipe.json`, `tokens/` of a text, and every measured loss (`losses.json` and
`rouge2.json`, and those of held-out data): the same command resumes, and another tolerable loss requires few
new measurements.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxllm.bundle import Bundle, Part, expert_widths
from jaxllm.bundle.calibrations import expert_parts
from jaxllm.checkpoints import huggingface
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.experts.bitwidth import search_widths
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_decoder_alone, require_feature
from jaxllm.models.parameters import sparse_layers
from jaxllm.prepare import prepare
from jaxllm.quant import dequantize
from jaxllm.text.builtin_texts import builtin_texts
from jaxllm.training.calibration import (
    LEAST_TOKENS,
    MEASURES,
    SEARCHED,
    BundleOutput,
    ExpertWidthsRecipe,
    PairWidthsRecipe,
    WidthTarget,
)
from jaxllm.training.data.corpus import TokenizedDocuments, write_tokens
from jaxllm.training.data.documents import (
    documents_digest,
    model_digest,
    read_texts,
    text_document,
)
from jaxllm.training.data.encoders import ModelEncoder
from jaxllm.training.data.rows import Batch, evaluation_batches
from jaxllm.training.experts.measures import (
    PairPerplexity,
    PairRouge,
    TextPerplexity,
    WidthLosses,
    nats_step,
    pair_visits,
)
from jaxllm.training.loop.dry_run import estimate_of, frozen_shapes, known_figures, placed_shapes, rows_shapes
from jaxllm.training.loop.fitting import FrozenModel
from jaxllm.training.loop.hardware import step_flops_per_token
from jaxllm.training.loop.parallel import ALL_DEVICES, MeshShape, make_mesh, require_divisible
from jaxllm.training.loop.run_files import Run, claimed, progress_bar
from jaxllm.training.seq2seq.pairs import PairRows, TextPairs
from jaxllm.training.seq2seq.run import LENGTHS, Translator

LOSSES_FILE = "losses.json"


@own_jax_settings()
def quantize_experts(
    recipe: ExpertWidthsRecipe,
    model: Path,
    out: BundleOutput,
    run: Run,
    *,
    target: WidthTarget = SEARCHED,
    texts: Sequence[Path] = (),
) -> dict[str, Any]:
    """Makes a bundle with separately stored experts, or resumes the run.

    Args:
      recipe: sizes of the measurement.
      model: mixture of experts: a Hugging Face folder or bundle.
      out: path of the bundle; its width is that of all other matrices, and a bundle keeps its own.
      target: requirements on the widths.
      texts: files to calibrate on; Python's language reference if empty.

    Returns:
      The results: bounds, number of lowered experts, losses on both texts, bytes of experts.

    Raises:
      ConfigError: the model has no experts, there is too little text, no widths lose so little, or
        the folder belongs to another run.
      CheckpointError: the model cannot be read.
    """
    model = Path(model)
    require_model(model, pairs=False)
    mesh = make_mesh(run.mesh_shape, recipe.batch)
    frozen = FrozenModel.read(model, None if model.is_dir() else out.weights, mesh=mesh)
    own = own_widths(model, frozen.cfg, target)
    floats = {name: dequantize(each, jnp.dtype(jnp.float32)) for name, each in frozen.params.items()}
    documents = [text_document(text) for path in texts for text in read_texts(path)]
    documents = documents or [text_document(text) for text in builtin_texts()]
    digest = documents_digest(each.digest() for each in documents)
    with claimed(run.folder, recipe, model=frozen.fingerprint(), documents=digest):
        if not (run.folder / "tokens").exists():
            encoder = ModelEncoder(frozen.tokenizer)
            write_tokens(run.folder / "tokens", ((0, each) for each in documents), encoder)
    batches, held_out = _split(TokenizedDocuments.read(run.folder / "tokens"), recipe)

    text = TextPerplexity(frozen.cfg, batches, mesh)
    losses = WidthLosses(frozen.cfg, floats, text, run.folder / LOSSES_FILE, mesh)
    visited = text.visited(losses.params)
    judge = TextPerplexity(frozen.cfg, held_out, mesh)
    unseen = WidthLosses(frozen.cfg, floats, judge, run.folder / f"held_out_{LOSSES_FILE}", mesh)
    by_measure = {"perplexity": losses}, {"perplexity": unseen}
    alone = visited.paths.alone
    shares = alone / np.maximum(alone.sum(-1, keepdims=True), 1.0)
    bits, facts = chosen_widths(*by_measure, "perplexity", shares, own, target, run.own_console)
    facts["tokens"] = text.tokens
    return write_widths(model, out, bits, facts, expert_parts(visited.paths, facts, visited.tokens))


def dry_run_experts(
    recipe: ExpertWidthsRecipe, model: Path, *, mesh_shape: MeshShape = ALL_DEVICES, device: str = ""
) -> dict[str, Any]:
    """Estimates memory and time of measuring the importance of each expert, from only the config of a
    folder; see `jaxllm.training.loop.dry_run`. The search for widths needs about ten more losses.

    Raises:
      ConfigError: the model has no experts, the mesh does not fit, or the device is unknown.
      CheckpointError: the config cannot be read.
    """
    known_figures(device)
    cfg = huggingface.read_config(model)
    if not cfg.experts:
        raise ConfigError(f"{model} is no mixture of experts; `jaxllm prepare` makes its bundle")
    require_decoder_alone(cfg, "estimates of measuring experts", "measure without --dry-run")
    mesh = make_mesh(mesh_shape, recipe.batch)
    require_divisible(cfg, mesh)
    row_tokens = min(recipe.row_tokens, cfg.window_tokens)
    params = placed_shapes(frozen_shapes(cfg, "f32", stack=False), mesh)
    with jax.set_mesh(mesh):
        step: Any = nats_step(cfg, mesh)
        compiled = step.trace(params, rows_shapes(recipe.batch, row_tokens, mesh)).lower().compile()
    tokens = recipe.batch * row_tokens
    losses = 1 + cfg.experts * sum(map(cfg.is_sparse, range(cfg.layers)))
    found = estimate_of(
        compiled,
        mesh,
        device=device,
        step_flops=step_flops_per_token(cfg, row_tokens) / 3 * tokens,
        steps=losses * -(-recipe.tokens // tokens),
    )
    return found.facts()


def require_model(model: Path, *, pairs: bool) -> None:
    """Checks that a model is a mixture whose experts can be measured.

    Args:
      model: Hugging Face folder or bundle.
      pairs: whether it is measured on pairs, as encoder-decoders are, or on a text.

    Raises:
      CheckpointError: there is no such model.
      ConfigError: it has no experts, or is measured on other data.
    """
    if not model.exists():
        raise CheckpointError(f"{model}: no such file or folder; give a Hugging Face folder or a bundle")
    if model.is_dir():
        cfg = huggingface.read_config(model)
    else:
        with Bundle.open(model) as bundle:
            cfg = bundle.cfg
    if cfg.encoder is not None and not pairs and cfg.experts:
        raise ConfigError(
            f"{model} is an encoder-decoder ({cfg.model_type}): its experts are measured on pairs of sources "
            "and targets; give them by --pairs"
        )
    if cfg.encoder is None and pairs:
        raise ConfigError(
            f"{model} is a decoder alone ({cfg.model_type}): its experts are measured on a text; give it by "
            "--text instead of --pairs"
        )
    if not cfg.experts:
        raise ConfigError(f"{model} is no mixture of experts; `jaxllm prepare` makes its bundle")


def own_widths(model: Path, cfg: ModelConfig, target: WidthTarget) -> np.ndarray:
    """The experts' current widths `[L_sparse, E]`, 32 in a folder.

    Raises:
      ConfigError: a bundle has narrower experts than are wished.
    """
    if model.is_dir():
        return np.full((len(sparse_layers(cfg)), cfg.experts), 32, np.int8)
    with Bundle.open(model) as bundle:
        own = expert_widths(bundle)
    if np.any(target.uniform > own):
        raise ConfigError(
            f"{model} has experts of {int(own.min())} bits, and {target.uniform} would be larger, not "
            "better; give no more, or the Hugging Face folder"
        )
    return own


def chosen_widths(
    losses: Mapping[str, WidthLosses],
    unseen: Mapping[str, WidthLosses],
    measure: str,
    loads: np.ndarray,
    own: np.ndarray,
    target: WidthTarget,
    console: Console,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Chooses the widths `[L_sparse, E]` for the target, and returns facts about them.

    Args:
      losses: losses by widths, by measure; of the perplexity always.
      unseen: the same on held-out data.
      measure: name of the measure that widths are chosen by.
      loads: `[L_sparse, E]`, frequency of each expert's loads, in any unit.
      own: see `own_widths`; upper bounds.
      target: requirements on the widths.
      console: console of the progress.
    """
    facts: dict[str, Any] = {}
    if target.uniform:
        bits, facts["uniform"] = np.full(own.shape, target.uniform, np.int8), target.uniform
    else:
        text = losses[measure]
        with progress_bar(console, "experts") as report:
            importance = text.importance(report)
        with console.status("searching widths"):
            plan = search_widths(importance, loads, text.loss_of, most_loss=target.most_loss)
        bits = np.minimum(plan.bits, own).astype(np.int8)
        facts["most_loss"] = target.most_loss
        facts |= {name: getattr(plan, name) for name in ("lower", "upper", "lowered")}
    facts["experts"] = int(bits.size)
    for lead, found in (("", losses), ("held_out_", unseen)):
        perplexity = found["perplexity"]
        facts[f"{lead}loss"] = round(found[measure].loss_of(bits), 5)
        facts[f"{lead}perplexity"] = round(math.exp(perplexity.whole), 4)
        if "rouge2" in found:
            facts[f"{lead}rouge2"] = round(found["rouge2"].whole, 5)
            facts[f"{lead}perplexity_loss"] = round(perplexity.loss_of(bits), 5)
    return bits, facts


def write_widths(
    model: Path, out: BundleOutput, bits: np.ndarray, facts: dict[str, Any], parts: Mapping[str, Part]
) -> dict[str, Any]:
    """Writes the bundle with experts at their widths; returns the facts with their counts."""
    prepare(model, out.path, weights=out.weights, name=out.name, expert_bits=bits, parts=parts)
    widths, number = np.unique(bits, return_counts=True)
    return {**facts, "widths": {str(width): int(each) for width, each in zip(widths, number, strict=True)}}


def _split(documents: TokenizedDocuments, recipe: ExpertWidthsRecipe) -> tuple[list[Batch], list[Batch]]:
    """The batches to calibrate on, and those held out."""
    taken: tuple[list[Batch], list[Batch]] = ([], [])
    room = [recipe.tokens, recipe.tokens]
    for number, batch in enumerate(evaluation_batches(documents, recipe.row_tokens, recipe.batch)):
        # Alternates, so that both have all kinds of the text; when one is full, the other gets the rest.
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


_ROUGE_FILE = "rouge2.json"


# Pairs to measure on: their rows, sources as token ids, and targets as texts.
_Pairs = tuple[PairRows, list[list[int]], list[str]]


@own_jax_settings()
def quantize_seq2seq_experts(
    recipe: PairWidthsRecipe,
    model: Path,
    out: BundleOutput,
    run: Run,
    *,
    pairs: TextPairs,
    prefix: str | None = None,
    target: WidthTarget = SEARCHED,
    measure: str = "perplexity",
) -> dict[str, Any]:
    """Makes a bundle of an encoder-decoder with separately stored experts, or resumes the run.

    Args:
      recipe: sizes of the measurement.
      model: Switch Transformers: a Hugging Face folder or bundle.
      out: path of the bundle; its width is that of all other matrices, and a bundle keeps its own.
      prefix: task prefix of each source; None for the model's own.
      target: requirements on the widths.
      measure: name in `MEASURES` of the metric that losses are measured by.

    Returns:
      The results: bounds, number of lowered experts, losses on both halves of the pairs.

    Raises:
      ConfigError: the model has no experts or no encoder, its experts cannot be stored separately, there
        are too few pairs, a pair is too long, no widths lose so little, or the folder belongs to another
        run.
      CheckpointError: the model cannot be read.
    """
    if measure not in MEASURES:
        raise ConfigError(f"losses are measured by {' or '.join(MEASURES)}, got {measure!r}")
    model = Path(model)
    require_model(model, pairs=True)
    translator = Translator.read(model)
    require_feature(translator.cfg, "separate experts")
    own = own_widths(model, translator.cfg, target)
    lead = translator.tokenizer.files.source_prefix if prefix is None else f"{prefix.strip()} "
    taken, kept = _split_pairs(pairs, translator, lead, recipe)
    digest = hashlib.blake2b(f"{lead}\0{pairs.digest()}".encode(), digest_size=16).hexdigest()
    with claimed(run.folder, recipe, model=model_digest(translator.cfg, translator.params), pairs=digest):
        pass

    def measured(each: _Pairs, lead: str) -> dict[str, WidthLosses]:
        """Losses by measure, of the perplexity always."""
        cfg, params = translator.cfg, translator.params
        rows, sources, targets = each
        perplexity = PairPerplexity(cfg, rows)
        found = {"perplexity": WidthLosses(cfg, params, perplexity, run.folder / f"{lead}{LOSSES_FILE}")}
        if measure == "rouge2":
            judged = PairRouge(translator, sources, targets, recipe.answer_tokens)
            found["rouge2"] = WidthLosses(cfg, params, judged, run.folder / f"{lead}{_ROUGE_FILE}")
        return found

    losses, unseen = measured(taken, ""), measured(kept, "held_out_")
    rows, _, targets = taken
    visits = pair_visits(translator.cfg, rows, losses["perplexity"].params)
    bits, facts = chosen_widths(losses, unseen, measure, visits.loads, own, target, run.own_console)
    tokens = sum(len(each) for _, each in rows.pairs)
    facts |= {"measure": measure, "pairs": len(targets), "tokens": tokens}
    parts = expert_parts(visits.decoder.paths, facts, visits.decoder.tokens, encoder=visits.encoder)
    return write_widths(model, out, bits, facts, parts)


def _split_pairs(
    pairs: TextPairs, translator: Translator, lead: str, recipe: PairWidthsRecipe
) -> tuple[_Pairs, _Pairs]:
    """The pairs to calibrate on, and those held out: alternately, until both have enough tokens."""
    sources = translator.encode([lead + source for source, _ in pairs.texts])
    targets = translator.encode([target for _, target in pairs.texts])
    longest = max(
        (max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)), default=0
    )
    if longest > LENGTHS[-1]:
        raise ConfigError(
            f"a source or a target has {longest} tokens; experts are measured on at most "
            f"{LENGTHS[-1]}: leave such pairs out"
        )
    places: tuple[list[int], list[int]] = ([], [])
    room = [recipe.tokens, recipe.tokens]
    for number, each in enumerate(targets):
        if room[number % 2] > 0:
            places[number % 2].append(number)
            room[number % 2] -= len(each)
    if max(room) > recipe.tokens - LEAST_TOKENS:
        raise ConfigError(
            f"the targets of {len(targets):,} pairs have {sum(map(len, targets)):,} tokens; calibrating and "
            f"holding out take at least {2 * LEAST_TOKENS:,}: give more pairs"
        )

    def chosen(own: list[int]) -> _Pairs:
        rows = PairRows(
            [(sources[each], targets[each]) for each in own],
            np.zeros(len(own), np.int32),
            LENGTHS,
            batch_tokens=recipe.batch_tokens,
            rows_multiple=1,
            start_id=translator.start_id,
            seed=0,
        )
        return rows, [sources[each] for each in own], [pairs.texts[each][1] for each in own]

    return chosen(places[0]), chosen(places[1])
