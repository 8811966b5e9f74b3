"""Chooses a bitwidth for each expert of an encoder-decoder, and writes a bundle with separately stored
experts.

EdgeMoE's own models, Switch Transformers (arXiv 2308.14352, section 3.2): each expert of both sides is
lowered in turn, with the others at 4 bits, and its importance is the model's loss on pairs of sources and
targets. Widths are then chosen within the tolerable loss, of the perplexity of the targets or of Rouge-2.
Successions of experts are counted for each side.

A run's folder has `recipe.json` and the measured losses: `losses.json` and `rouge2.json`, and those of the
held-out pairs. The same command resumes.
"""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jaxllm.bundle.calibrations import expert_parts
from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings
from jaxllm.models.features import require_room
from jaxllm.training.calibration import LEAST_TOKENS, BundleOutput, PairWidthsRecipe, WidthTarget
from jaxllm.training.data.documents import model_digest
from jaxllm.training.experts import expert_widths
from jaxllm.training.experts.expert_widths import LOSSES_FILE
from jaxllm.training.experts.pair_measures import PairPerplexity, PairRouge, pair_visits
from jaxllm.training.experts.width_losses import WidthLosses
from jaxllm.training.loop.run_files import claimed
from jaxllm.training.seq2seq.batches import PairRows
from jaxllm.training.seq2seq.pairs import TextPairs
from jaxllm.training.seq2seq.translation import LENGTHS, Translator

# What a loss is a loss of: the perplexity of the targets, or Rouge-2 of the model's answers.
MEASURES = ("perplexity", "rouge2")
_ROUGE_FILE = "rouge2.json"


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Pairs to measure on: their rows, sources as token ids, and targets as texts."""

    rows: PairRows
    sources: list[list[int]]
    targets: list[str]


@own_jax_settings()
def quantize_seq2seq_experts(
    recipe: PairWidthsRecipe,
    model: Path,
    out: BundleOutput,
    run_dir: Path,
    *,
    pairs: TextPairs,
    prefix: str | None = None,
    target: WidthTarget | None = None,
    measure: str = "perplexity",
) -> dict[str, Any]:
    """Makes a bundle of an encoder-decoder with separately stored experts, or resumes the run in `run_dir`.

    Args:
      recipe: sizes of the measurement.
      model: Switch Transformers: a Hugging Face folder or bundle.
      out: path of the bundle; its width is that of all other matrices, and a bundle keeps its own.
      run_dir: folder of the run, created if missing.
      pairs: pairs of sources and targets.
      prefix: task prefix of each source; None for the model's own.
      target: requirements on the widths.
      measure: name in `MEASURES` of the metric that losses are measured by.

    Returns:
      The results: bounds, number of lowered experts, losses on both halves of the pairs.

    Raises:
      ConfigError: the model has no experts or no encoder, its experts cannot be stored separately, there
        are too few pairs, a pair is too long, no widths lose so little, or `run_dir` belongs to another
        run.
      CheckpointError: the model cannot be read.
    """
    if measure not in MEASURES:
        raise ConfigError(f"losses are measured by {' or '.join(MEASURES)}, got {measure!r}")
    run_dir, model, target = Path(run_dir), Path(model), target or WidthTarget()
    expert_widths.require_model(model, pairs=True)
    # Progress goes to the terminal's error stream.
    translator, console = Translator.read(model), Console(stderr=True)
    require_room(translator.cfg, "experts apart")
    own = expert_widths.own_widths(model, translator.cfg, target)
    lead = translator.tokenizer.files.source_prefix if prefix is None else f"{prefix.strip()} "
    taken, kept = _split(pairs, translator, lead, recipe)
    digest = hashlib.blake2b(f"{lead}\0{pairs.digest()}".encode(), digest_size=16).hexdigest()
    with claimed(run_dir, recipe, model=model_digest(translator.cfg, translator.params), pairs=digest):
        pass

    def measured(each: _Pairs, lead: str) -> dict[str, WidthLosses]:
        """Losses by measure, of the perplexity always."""
        cfg, params = translator.cfg, translator.params
        perplexity = PairPerplexity(cfg, each.rows)
        found = {"perplexity": WidthLosses(cfg, params, perplexity, run_dir / f"{lead}{LOSSES_FILE}")}
        if measure == "rouge2":
            judged = PairRouge(translator, each.sources, each.targets, recipe.answer_tokens)
            found["rouge2"] = WidthLosses(cfg, params, judged, run_dir / f"{lead}{_ROUGE_FILE}")
        return found

    losses, unseen = measured(taken, ""), measured(kept, "held_out_")
    visits = pair_visits(translator.cfg, taken.rows, losses["perplexity"].params)
    bits, facts = expert_widths.chosen_widths(losses[measure], visits.loads, own, target, console)
    facts |= {
        "measure": measure,
        "experts": int(bits.size),
        "loss": round(losses[measure].loss_of(bits), 5),
        "held_out_loss": round(unseen[measure].loss_of(bits), 5),
        **_more_facts(losses, bits, ""),
        **_more_facts(unseen, bits, "held_out_"),
        "pairs": len(taken.targets),
        "tokens": sum(len(each) for _, each in taken.rows.pairs),
    }
    encoder = visits.encoder.paths, visits.encoder.tokens
    parts = expert_parts(visits.decoder.paths, facts, visits.decoder.tokens, encoder=encoder)
    return expert_widths.write_widths(model, out, bits, facts, parts)


def _more_facts(losses: dict[str, WidthLosses], bits: np.ndarray, lead: str) -> dict[str, float]:
    """Returns the perplexity of the float model, and its Rouge-2 if measured; then also the loss of the
    perplexity."""
    perplexity = losses["perplexity"]
    found = {f"{lead}perplexity": round(math.exp(perplexity.whole), 4)}
    if "rouge2" in losses:
        found[f"{lead}rouge2"] = round(losses["rouge2"].whole, 5)
        found[f"{lead}perplexity_loss"] = round(perplexity.loss_of(bits), 5)
    return found


def _split(
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
        return _Pairs(rows, [sources[each] for each in own], [pairs.texts[each][1] for each in own])

    return chosen(places[0]), chosen(places[1])
