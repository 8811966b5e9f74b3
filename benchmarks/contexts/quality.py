"""Measures what compression costs in quality: a trained model continues contexts restored from storage.

Each context is computed once; all of its chunks are stored in an encoding and decoded again, and the model
continues from there:

- `perplexity` of a text behind its own beginning,
- `accuracy` of answers to tasks' questions that were stored themselves, behind other questions with answers,
- `recall` of each chunk in turn: its beginning is repeated at the end of the context, and what is measured is
  how much likelier its rest is than with other text in the chunk's place.

Whether widths by density matter (LLMS, sections 3.2 and 5.2) is tested at equal bytes: against the same ones
shuffled over the chunks, and against flat ones, at most two neighbouring widths, spread evenly. Every
difference is taken context by context, and given with its 95 % interval: where that holds 0, density was not
shown to matter.

Outliers can be put into the keys of a model without changing what it computes: a pair of channels that rotary
embedding turns together is made larger in keys by a power of two, and smaller in queries. Large models have
such channels by themselves (KIVI, arXiv 2402.02750, figure 2).
"""

import contextlib
import dataclasses
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.contexts import Plan, Setting
from benchmarks.contexts.switching import copied
from benchmarks.harness.bench import Run
from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.samples import read_examples, story_tokens, text_windows
from benchmarks.traces import TRACE_TASKS
from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.calibrations import has_channel_scales
from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import WIDTHS
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.quant import BlockedArray
from jaxllm.serving.contexts.chunk_io import ChunkIO, kept_by
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.contexts.saving import grown_record, least_ratio
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.runners.scorer import Scorer
from jaxllm.serving.server.service import CODEC, CODEC_CHUNK_TOKENS
from jaxllm.tasks.questions import branching
from jaxllm.text.prompts import end_of_turn_id, prompt_ids

# Of the window that is stored; the rest is fed behind it.
STORED_SHARE = 0.75


def quality_rows(bench: Run[Plan]) -> list[Row]:
    """Perplexity, accuracy and recall of every encoding, as services store chunks."""
    options = EngineOptions(kv_codec=CODEC, kv_chunk_tokens=CODEC_CHUNK_TOKENS)
    engine = Engine.open(bench.path(), options=options, progress=bench.progress)
    window = engine.options.context_tokens
    Scorer(engine.runner).prepare(window, bench.progress)
    chunk_io = ChunkIO(engine.runner, kept_by(engine))
    stored_tokens = int(STORED_SHARE * window) // chunk_io.chunk_tokens * chunk_io.chunk_tokens
    stories = story_tokens(engine.tokenizer, bench.plan.data)
    return [
        *_perplexity(chunk_io, stories, stored_tokens, bench),
        *_accuracy(engine, chunk_io, stored_tokens, bench),
        *_passages(chunk_io, stories, stored_tokens, bench),
    ]


def _perplexity(chunk_io: ChunkIO, stories: list[int], stored_tokens: int, bench: Run[Plan]) -> list[Row]:
    window, scorer, plan = chunk_io.runner.options.context_tokens, Scorer(chunk_io.runner), bench.plan
    loss, count, sizes, widths = Counter[str](), 0, {}, {}
    for number, text in enumerate(text_windows(stories, window, plan.texts)):
        stored = Stored.of(chunk_io, text[:stored_tokens], plan.seed + number)
        later = text[stored_tokens - 1 :]
        for encoding in stored.encodings:
            # The first token behind the context is predicted by the last stored one, which is not fed.
            scores = scorer.score(later[1:-1], later[2:], stored.restored(encoding))
            loss[encoding] -= float(scores.sum(dtype="float64"))  # pyright: ignore[reportArgumentType]
            sizes[encoding] = stored.bytes_of(encoding)
            if encoding in stored.widths:
                widths.setdefault(encoding, Counter()).update(stored.widths[encoding].tolist())
        count += len(later) - 2
        bench.progress("perplexity", number + 1, plan.texts)
    values = {encoding: math.exp(each / count) for encoding, each in loss.items()}
    notes = {
        encoding: f"{value / values[EIGHT] - 1:+.2%} against {EIGHT}; "
        f"{sizes[encoding] / stored_tokens:,.0f} bytes per token{_said(widths.get(encoding))}; "
        f"{count:,} tokens"
        for encoding, value in values.items()
    }
    return compared(f"text behind {stored_tokens} stored tokens", "perplexity", values, notes)


def _accuracy(engine: Engine, chunk_io: ChunkIO, stored_tokens: int, bench: Run[Plan]) -> list[Row]:
    examples = read_examples(TRACE_TASKS, bench.plan.data, bench.plan.questions)
    end, scorer = end_of_turn_id(engine.tokenizer), Scorer(chunk_io.runner)
    right: dict[str, list[bool]] = {}
    asked, done = sum(map(len, examples.values())), 0
    for group in examples.values():
        # Questions with their right answers, as contexts hold them.
        said = [
            [
                *prompt_ids(engine.tokenizer, each),
                *engine.tokenizer.encode(each.answer, add_special_tokens=False),
                *([] if end is None else [end]),
            ]
            for each in group
        ]
        for place, example in enumerate(group):
            done += 1
            question = branching(engine.tokenizer, example, end)
            # The other questions of its task with their answers come before it, the last of them whole.
            history = [token for each in [*said[place + 1 :], *said[:place]] for token in each]
            whole = [*history, *question.trunk]
            # What does not fill a chunk is fed anew, the last token at least.
            tail = len(question.trunk) % chunk_io.chunk_tokens or chunk_io.chunk_tokens
            size = min(stored_tokens, (len(whole) - tail) // chunk_io.chunk_tokens * chunk_io.chunk_tokens)
            if not 0 < len(question.trunk) - tail <= size:
                continue
            before, trunk = whole[-tail - size : -tail], whole[-tail:]
            stored = Stored.of(chunk_io, before, bench.plan.seed + done)
            for encoding in stored.encodings:
                restored = stored.restored(encoding)
                scores = []
                for branch in question.branches:
                    ids = [*trunk, *branch]
                    found = scorer.score(ids[:-1], ids[1:], copied(restored))
                    scores.append(float(found[len(trunk) - 1 :].sum()))
                chosen = example.options[int(np.argmax(scores))]
                right.setdefault(encoding, []).append(chosen == example.answer)
            bench.progress("questions", done, asked)
    if not right:
        raise ConfigError(
            f"no question is stored in whole chunks of {stored_tokens} tokens; take a model of a longer "
            "window"
        )
    shares = {encoding: float(np.mean(each)) for encoding, each in right.items()}
    notes = {
        encoding: f"{np.mean(np.array(each) == np.array(right[EIGHT])):.1%} judged as by {EIGHT}; "
        f"{len(each)} questions of {', '.join(TRACE_TASKS)}"
        for encoding, each in right.items()
    }
    return compared(f"questions in up to {stored_tokens} stored tokens", "accuracy", shares, notes)


def _passages(chunk_io: ChunkIO, stories: list[int], stored_tokens: int, bench: Run[Plan]) -> list[Row]:
    scorer, size, plan = Scorer(chunk_io.runner), chunk_io.chunk_tokens, bench.plan
    # The first half of a chunk is repeated before its rest is scored.
    chunks, begun = stored_tokens // size, size // 2
    gains: dict[str, list[float]] = {}
    texts = list(text_windows(stories, stored_tokens + size, plan.passages))
    for number, text in enumerate(texts):
        at = size * _in_turn(number, len(texts), chunks)
        context, other = text[:stored_tokens], text[stored_tokens:]
        passage = context[at : at + size]

        def rest(cache: KVCache, passage: list[int] = passage) -> float:
            return float(scorer.score(passage[:-1], passage[1:], cache)[begun - 1 :].mean())

        without = Stored.raw(chunk_io, [*context[:at], *other, *context[at + size :]])
        unseen = rest(without.restored(RAW))
        stored = Stored.of(chunk_io, context, plan.seed + number)
        for encoding in stored.encodings:
            gains.setdefault(encoding, []).append(rest(stored.restored(encoding)) - unseen)
        bench.progress("passages", number + 1, len(texts))
    # Around zero there is no ratio.
    case, rows = f"passage of {stored_tokens} stored tokens repeated", []
    for encoding, each in gains.items():
        lost = np.array(each) - np.array(gains[EIGHT])
        note = (
            f"{lost.mean():+.4f} ± {lost.std() / math.sqrt(len(lost)):.4f} against {EIGHT}; {len(each)} "
            f"passages, in turn of {chunks} chunks"
        )
        rows.append(row(case, "recall", float(np.mean(each)), note, system=encoding))
    return rows


def _in_turn(number: int, texts: int, chunks: int) -> int:
    """The chunk that is repeated behind a text: each in turn; of fewer texts, spread over the context."""
    return number * chunks // texts if texts < chunks else number % chunks


def _said(widths: Counter[int] | None) -> str:
    """How many chunks of all texts have each width, for notes."""
    if widths is None:
        return ""
    counts = ", ".join(f"{widths[bits]} at {bits} bits" for bits in WIDTHS if widths[bits])
    return f", chunks: {counts}"


RAW = "raw"
EIGHT = "8 bit"
_FLAT = {EIGHT: 8, "4 bit": 4, "2 bit": 2}
_ORIGIN = Origin(
    model="", level=100, adapter="", codec="raw", chunk_tokens=1, dtype="", heads=(), head_width=4
)
_EMPTY = Record(name="", app="", origin=_ORIGIN)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A context that can be restored from several encodings.

    Attributes:
      cache: as it was computed; all of its tokens are in whole chunks.
      widths: bits of each chunk, by encoding.
    """

    chunk_io: ChunkIO
    cache: KVCache
    widths: dict[Any, np.ndarray]

    @classmethod
    def of(cls, chunk_io: ChunkIO, tokens: list[int], seed: int) -> "Stored":
        """Computes a context and the widths of its chunks: flat ones, ours as services store them, and these
        shuffled over the chunks but the newest.

        Args:
          chunk_io: of an engine that chooses widths.
          tokens: of the context; as many as fill whole chunks.
        """
        stored, chunks = cls.raw(chunk_io, tokens), len(tokens) // chunk_io.chunk_tokens
        stored.widths.update({name: np.full(chunks, bits) for name, bits in _FLAT.items()})
        stored.widths[OURS] = bits = density_widths(chunk_io, tokens, stored.cache, ContextOptions.ratio)
        shuffled = np.random.default_rng(seed).permutation(bits[:-1])
        stored.widths[f"{OURS}-shuffled"] = np.concatenate([shuffled, bits[-1:]])
        return stored

    @classmethod
    def raw(cls, chunk_io: ChunkIO, tokens: list[int]) -> "Stored":
        """Computes a context of whole chunks, without any widths."""
        runner = chunk_io.runner
        assert len(tokens) % chunk_io.chunk_tokens == 0
        _, cache = prefill_prompt(runner, runner.start(runner.options.context_tokens), tokens, 0)
        return cls(chunk_io, cache, {})

    @property
    def encodings(self) -> list[str]:
        """Names of all encodings, ours first."""
        return sorted([*self.widths, RAW], key=lambda name: not name.startswith(OURS))

    def restored(self, encoding: Any) -> KVCache:
        """The cache as it is restored from an encoding."""
        if encoding == RAW:
            return copied(self.cache)
        coded = self.chunk_io.encode(self.cache, dict(enumerate(self.widths[encoding].tolist())))
        runner = self.chunk_io.runner
        cache = self.chunk_io.load(runner.start(runner.options.context_tokens), coded)
        jax.block_until_ready(cache.keys)
        return dataclasses.replace(cache, length=np.int32(len(coded) * self.chunk_io.chunk_tokens))

    def bytes_of(self, encoding: Any) -> int:
        """Bytes of all chunks in an encoding."""
        if encoding == RAW:
            return sum(each.nbytes for each in (*self.cache.keys, *self.cache.values))
        return sum(self.chunk_io.chunk_bytes(bits) for bits in self.widths[encoding].tolist())


def density_widths(chunk_io: ChunkIO, tokens: list[int], cache: KVCache, ratio: float) -> np.ndarray:
    """Widths `[N]` of a context's chunks as ours chooses them by density, at a ratio of bytes."""
    record = grown_record(
        _EMPTY, chunk_io, ContextOptions(folder="", ratio=ratio),
        tokens=tokens, mass=np.asarray(cache.mass)[0], first=0, cached_tokens=len(tokens),
    )  # fmt: skip
    return np.array(record.bits)


def write_with_outliers(model: Path, out: Path, factor: float = 4.0) -> None:
    """Writes a bundle whose keys have two channels per head that are larger.

    Args:
      model: a bundle of 8 bits with a scale per channel.
    """
    with Bundle.open(model) as bundle:
        cfg = bundle.cfg
        if not has_channel_scales(bundle) or cfg.qk_norm or cfg.joint_qk_norm or cfg.qkv_bias or cfg.qkv_clip:
            raise ConfigError(
                f"outliers cannot be put into {model}: it takes 8-bit weights with a scale per channel, and "
                "queries and keys without norms, biases and clipping"
            )
        changed = {}
        for layer in range(cfg.layers):
            for part, by in (("q", 1 / factor), ("k", factor)):
                name = f"layers.{layer}.attn.{part}"
                stored = bundle.stored(name)
                assert isinstance(stored, BlockedArray)
                changed[name] = _scaled(stored, cfg, by)
        # Steps of integer prefill are those of other weights.
        parts = dict.fromkeys(bundle.layout.parts.keys() & {"prefill", "contexts"})
        rewrite_bundle(out, bundle, parts, instead=changed)


def _scaled(weight: BlockedArray, cfg: ModelConfig, factor: float) -> BlockedArray:
    """A weight `[K, n·H, D]` with the rows of two channels of each head multiplied."""
    pairs = (cfg.head_dim if cfg.rope is None else cfg.rope.dim) // 2
    by = np.ones(cfg.head_dim, np.float32)
    # The pair that turns slowest.
    by[[pairs - 1, 2 * pairs - 1]] = factor
    units, rows, _ = weight.shape
    scale = np.array(weight.scale)
    scale[: units * rows] *= np.tile(by, units * rows // cfg.head_dim)
    return dataclasses.replace(weight, scale=scale)  # pyright: ignore[reportArgumentType]: a host array


SHUFFLED, FLAT = "shuffled", "flat"
KINDS = (OURS, SHUFFLED, FLAT)


def density_rows(bench: Run[Plan]) -> list[Row]:
    """Perplexity and recall of the three kinds of widths, by setting and ratio."""
    rows, model = [], bench.path()
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        changed = Path(folder) / "outliers.jaxllm"
        if any(each.outliers for each in bench.plan.settings):
            write_with_outliers(model, changed)
        for setting in bench.plan.settings:
            path = changed if setting.outliers else model
            options = EngineOptions(kv_codec=setting.codec, kv_chunk_tokens=setting.chunk_tokens)
            with contextlib.closing(Engine.open(path, options=options, progress=bench.progress)) as engine:
                rows += _setting_rows(engine, setting, bench)
    return rows


def _setting_rows(engine: Engine, setting: Setting, bench: Run[Plan]) -> list[Row]:
    plan, window = bench.plan, engine.options.context_tokens
    chunk_io, scorer = ChunkIO(engine.runner, kept_by(engine)), Scorer(engine.runner)
    scorer.prepare(window, bench.progress)
    size = chunk_io.chunk_tokens
    chunks = int(STORED_SHARE * window) // size
    # Ratios have few digits: 0.4 is not exactly two fifths.
    ratios = [each for each in plan.ratios if each >= least_ratio(chunk_io) - 1e-6]
    if not ratios:
        raise ConfigError(f"{setting.name}: scales leave no room for any of the ratios {plan.ratios}")
    losses: dict[tuple[float, str], list[tuple[float, float]]] = {}
    sizes: dict[tuple[float, str], list[int]] = {}
    texts = list(text_windows(story_tokens(engine.tokenizer, plan.data), window, plan.density_texts))
    for number, text in enumerate(texts):
        at = _in_turn(number, len(texts), chunks)
        stored = Stored.raw(chunk_io, text[: chunks * size])
        draw = np.random.default_rng(plan.seed + number)
        for ratio in ratios:
            bits = density_widths(chunk_io, text[: chunks * size], stored.cache, ratio)
            stored.widths[ratio, OURS] = bits
            stored.widths[ratio, SHUFFLED] = draw.permutation(bits)
            stored.widths[ratio, FLAT] = flat_widths(
                len(bits),
                stored.bytes_of((ratio, OURS)),
                {each: chunk_io.chunk_bytes(each) for each in WIDTHS},
            )
        for key, found in _losses(stored, text, text[at * size : (at + 1) * size], scorer).items():
            losses.setdefault(key, []).append(found)
            sizes.setdefault(key, []).append(stored.bytes_of(key))
        bench.progress(f"density, {setting.name}", number + 1, len(texts))
    left_out = ", ".join(f"{each:g}" for each in plan.ratios if each not in ratios)
    note = f"; left out: ratio {left_out}, less than 2 bits take" if left_out else ""
    rows = []
    for ratio in ratios:
        whole = chunks * chunk_io.reference_bytes
        shares = {kind: float(np.mean(sizes[ratio, kind])) / whole for kind in KINDS}
        for place, metric in enumerate(("perplexity", "recall_loss")):
            nats = {kind: np.array([each[place] for each in losses[ratio, kind]]) for kind in KINDS}
            means = {kind: float(each.mean()) for kind, each in nats.items()}
            rows += compared(
                f"density: {setting.name}, ratio {ratio:g}, {chunks * size} stored tokens",
                metric,
                {kind: math.exp(each) for kind, each in means.items()} if place == 0 else means,
                {
                    kind: f"{shares[kind]:.3f} of the bytes{_difference(nats[OURS], each)}; {len(each)} "
                    f"contexts{note}"
                    for kind, each in nats.items()
                },
            )
    return rows


def flat_widths(count: int, budget_bytes: int, sizes: Mapping[int, int]) -> np.ndarray:
    """Two neighbouring widths, the wider of which is spread evenly over `count` chunks."""
    for wide, narrow in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[-1]), strict=True):
        left = budget_bytes - count * sizes[narrow]
        if left < 0:
            continue
        wider = min(count, left // (sizes[wide] - sizes[narrow])) if wide != narrow else 0
        steps = np.arange(count + 1) * wider // count if count else np.zeros(1, int)
        return np.where(np.diff(steps) > 0, wide, narrow)
    raise ConfigError(f"{count} chunks take more than {budget_bytes} bytes at {min(WIDTHS)} bits")


def _losses(
    stored: Stored, text: list[int], passage: list[int], scorer: Scorer
) -> dict[tuple[float, str], tuple[float, float]]:
    """By ratio and kind, the loss (nats per token) behind a context, and of the second half of a chunk when
    all of it is repeated."""
    # The first token behind the context is predicted by the last stored one, which is not fed.
    later = text[int(stored.cache.length) :]
    known: dict[bytes, tuple[float, float]] = {}
    for key, bits in stored.widths.items():
        if (same := bits.tobytes()) not in known:
            behind = scorer.score(later[:-1], later[1:], stored.restored(key))
            again = scorer.score(passage[:-1], passage[1:], stored.restored(key))[len(passage) // 2 - 1 :]
            known[same] = -float(behind.mean(dtype=np.float64)), -float(again.mean(dtype=np.float64))
    return {key: known[bits.tobytes()] for key, bits in stored.widths.items()}


def _difference(ours: np.ndarray, other: np.ndarray) -> str:
    """How many more nats per token another one loses than ours, with its 95 % interval."""
    if other is ours:
        return ""
    more = other - ours
    half = 1.96 * float(more.std(ddof=1)) / math.sqrt(len(more)) if len(more) > 1 else math.inf
    return f"; {more.mean():+.4f} ± {half:.4f} nats/token against {OURS}"
