"""Measures what compression costs in quality: a trained model continues contexts restored from storage.

Each context is computed once; all of its chunks are stored in an encoding and decoded again, and the model
continues from there:

- `perplexity` of a text behind its own beginning,
- `accuracy` of answers to tasks' questions that were stored themselves, behind other questions with answers,
- `recall` of each chunk in turn: its beginning is repeated at the end of the context, and what is measured is
  how much likelier its rest is than with other text in the chunk's place.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np

from benchmarks.contexts.encodings import EIGHT, RAW, Stored, copied
from benchmarks.contexts.systems import OURS
from benchmarks.measuring.report import Row, compared
from benchmarks.samples.questions import read_examples
from benchmarks.samples.stories import story_tokens, text_windows
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.tasks.branching import branching
from jaxllm.tasks.example import TaskExample
from jaxllm.text.prompts import end_of_turn_id, prompt_ids
from serving.contexts.chunk_io import ChunkIO, kept_by
from serving.engine import Engine
from serving.host.progress import Progress
from serving.options import EngineOptions
from serving.traces.trace import TRACE_TASKS

RATIOS = {OURS: 0.5}
# Of a chunk: the share of it that is repeated before its rest is scored.
_BEGUN_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityPlan:
    """Sizes.

    Attributes:
      texts: windows that perplexity is measured in.
      questions: of each task.
      passages: chunks whose beginning is repeated, all chunks in turn.
      context_share: of the window that is stored; the rest is fed behind it.
      codec: of chunks.
      seed: of all draws.
    """

    texts: int = 96
    questions: int = 20
    passages: int = 96
    context_share: float = 0.75
    codec: str = "channel"
    seed: int = 0

    @classmethod
    def quick(cls) -> "QualityPlan":
        """Fits in seconds for a model of some million parameters."""
        return cls(texts=6, questions=1, passages=6)


def quality_rows(
    model: Path, data: Path | None, plan: QualityPlan, progress: Progress | None = None
) -> list[Row]:
    """Perplexity, accuracy and recall of every encoding.

    Args:
      model: a bundle of a trained model.
      data: the folder of texts and tasks, whose validation halves are read; None takes packaged samples.
      plan: how much.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: the data are not there, or too little.
    """
    engine = Engine.open(model, options=EngineOptions(kv_codec=plan.codec), progress=progress)
    window = engine.options.context_tokens
    engine.runner.scorer().prepare(window, progress)
    chunk_io = ChunkIO(engine.runner, kept_by(engine))
    stored_tokens = int(plan.context_share * window) // chunk_io.chunk_tokens * chunk_io.chunk_tokens
    stories = story_tokens(engine.tokenizer, data)
    return [
        *_perplexity(chunk_io, stories, stored_tokens, plan, progress),
        *_accuracy(engine, chunk_io, data, stored_tokens, plan, progress),
        *_passages(chunk_io, stories, stored_tokens, plan, progress),
    ]


def _perplexity(
    chunk_io: ChunkIO, stories: list[int], stored_tokens: int, plan: QualityPlan, progress: Progress | None
) -> list[Row]:
    window, scorer = chunk_io.runner.options.context_tokens, chunk_io.runner.scorer()
    loss, count, sizes = {}, 0, {}
    for number, text in enumerate(text_windows(stories, window, plan.texts)):
        stored = Stored.of(chunk_io, text[:stored_tokens], RATIOS, plan.seed + number)
        later = text[stored_tokens - 1 :]
        for encoding in stored.encodings:
            # The first token behind the context is predicted by the last stored one, which is not fed.
            scores = scorer.score(later[1:-1], later[2:], stored.restored(encoding))
            loss[encoding] = loss.get(encoding, 0.0) - float(scores.sum(dtype="float64"))
            sizes[encoding] = stored.bytes_of(encoding)
        count += len(later) - 2
        _tell(progress, "perplexity", number + 1, plan.texts)
    values = {encoding: math.exp(each / count) for encoding, each in loss.items()}
    notes = {
        encoding: f"{value / values[EIGHT] - 1:+.2%} against {EIGHT}; "
        f"{sizes[encoding] / stored_tokens:,.0f} bytes per token; "
        f"{count:,} tokens"
        for encoding, value in values.items()
    }
    return compared(
        values, ours=OURS, case=f"text behind {stored_tokens} stored tokens", metric="perplexity", unit="",
        notes=notes, lower_is_better=True,
    )  # fmt: skip


def _accuracy(
    engine: Engine,
    chunk_io: ChunkIO,
    data: Path | None,
    stored_tokens: int,
    plan: QualityPlan,
    progress: Progress | None,
) -> list[Row]:
    examples = read_examples(TRACE_TASKS, data, plan.questions)
    end = end_of_turn_id(engine.tokenizer)
    right: dict[str, list[bool]] = {}
    asked = sum(len(each) for each in examples.values())
    done = 0
    for group in examples.values():
        said = [_said(engine, each, end) for each in group]
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
            stored = Stored.of(chunk_io, before, RATIOS, plan.seed + done)
            for encoding in stored.encodings:
                restored = stored.restored(encoding)
                scores = [_score(chunk_io, copied(restored), trunk, list(each)) for each in question.branches]
                chosen = example.options[int(np.argmax(scores))]
                right.setdefault(encoding, []).append(chosen == example.answer)
            _tell(progress, "questions", done, asked)
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
    return compared(
        shares, ours=OURS, case=f"questions in up to {stored_tokens} stored tokens", metric="accuracy",
        unit="share", notes=notes,
    )  # fmt: skip


def _passages(
    chunk_io: ChunkIO, stories: list[int], stored_tokens: int, plan: QualityPlan, progress: Progress | None
) -> list[Row]:
    scorer, size = chunk_io.runner.scorer(), chunk_io.chunk_tokens
    chunks, begun = stored_tokens // size, round(_BEGUN_SHARE * size)
    gains: dict[str, list[float]] = {}
    texts = list(text_windows(stories, stored_tokens + size, plan.passages))
    for number, text in enumerate(texts):
        # Where there are fewer passages than chunks they are spread over the context.
        at = size * (number * chunks // len(texts) if len(texts) < chunks else number % chunks)
        context, other = text[:stored_tokens], text[stored_tokens:]
        passage = context[at : at + size]

        def rest(cache: KVCache, passage: list[int] = passage) -> float:
            return float(scorer.score(passage[:-1], passage[1:], cache)[begun - 1 :].mean())

        without = Stored.of(chunk_io, [*context[:at], *other, *context[at + size :]], {}, plan.seed)
        unseen = rest(without.restored(RAW))
        stored = Stored.of(chunk_io, context, RATIOS, plan.seed + number)
        for encoding in stored.encodings:
            gains.setdefault(encoding, []).append(rest(stored.restored(encoding)) - unseen)
        _tell(progress, "passages", number + 1, len(texts))
    values = {encoding: float(np.mean(each)) for encoding, each in gains.items()}
    notes = {}
    for encoding, each in gains.items():
        lost = np.array(each) - np.array(gains[EIGHT])
        notes[encoding] = (
            f"{lost.mean():+.4f} ± {lost.std() / math.sqrt(len(lost)):.4f} against {EIGHT}; {len(each)} "
            f"passages, in turn of {chunks} chunks"
        )
    return compared(
        values, ours=OURS, case=f"passage of {stored_tokens} stored tokens repeated", metric="recall",
        unit="nats/token", notes=notes,
    )  # fmt: skip


def _score(chunk_io: ChunkIO, cache: KVCache, trunk: list[int], branch: list[int]) -> float:
    """Log-probability of an answer behind the end of a question."""
    whole = [*trunk, *branch]
    scores = chunk_io.runner.scorer().score(whole[:-1], whole[1:], cache)
    return float(scores[len(trunk) - 1 :].sum())


def _said(engine: Engine, example: TaskExample, end: int | None) -> list[int]:
    """Token ids of a question with its right answer, as a context holds them."""
    answer = engine.tokenizer.encode(example.answer, add_special_tokens=False)
    return [*prompt_ids(engine.tokenizer, example), *answer, *([] if end is None else [end])]


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)
