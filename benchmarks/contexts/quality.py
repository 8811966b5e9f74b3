"""What compression costs in quality: a trained model goes on from contexts that came back from storage.

All systems get the same contexts, each computed once; then all of its chunks are stored in a form and decoded
again, and the model reads on from there:

- perplexity of a text behind its own beginning,
- right answers to tasks' questions that were stored themselves, behind other questions with their answers,
- a passage of one chunk, each in turn, that is begun again at the end: how much likelier its rest is than
  with other text in the passage's place (`recall`). That is what the model still finds of the chunk.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.contexts.forms import EIGHT, RAW, Stored, copied
from benchmarks.contexts.systems import OURS
from benchmarks.report import Row, compared
from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.tasks.branching import branching
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.prompts import end_of_turn_id, prompt_ids
from serving.contexts.graphs import ContextGraphs
from serving.engine import Engine
from serving.evaluation.tasks import read_questions
from serving.options import EngineOptions
from serving.progress import Progress
from serving.trace import TRACE_TASKS

# Ours, and a form with less, where it matters more which chunks are narrow.
RATIOS = {OURS: 0.5, f"{OURS}-ratio-0.375": 0.375}
_TEXT, _SEPARATOR = Path("text", "tinystories_valid.txt"), "<|endoftext|>"
# Of a chunk: how much of it is said again before its rest is asked for.
_BEGUN_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityPlan:
    """Sizes.

    Attributes:
      texts: windows that perplexity is measured in.
      questions: of each task.
      passages: that are begun again, over all chunks in turn.
      context_share: of the window that is stored; the rest is read on.
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
        return cls(texts=12, questions=4, passages=12)


def quality_rows(model: Path, data: Path, plan: QualityPlan, progress: Progress | None = None) -> list[Row]:
    """Perplexity, accuracy and recall of every form.

    Args:
      model: a bundle of a trained model.
      data: the folder of texts and tasks, whose validation halves are read.
      plan: how much.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: the data are not there, or too little.
    """
    engine = Engine.open(model, options=EngineOptions(kv_codec=plan.codec), progress=progress)
    window = engine.options.context_tokens
    engine.table.fill(engine.table.score_buckets(window), progress)
    graphs = ContextGraphs(engine.table)
    held = int(plan.context_share * window) // graphs.chunk_tokens * graphs.chunk_tokens
    stories = _stories(engine, data)
    return [
        *_perplexity(graphs, stories, held, plan, progress),
        *_accuracy(engine, graphs, data, held, plan, progress),
        *_passages(graphs, stories, held, plan, progress),
    ]


def _perplexity(
    graphs: ContextGraphs, stories: list[int], held: int, plan: QualityPlan, progress: Progress | None
) -> list[Row]:
    window, table = graphs.table.options.context_tokens, graphs.table
    loss, count, sizes = {}, 0, {}
    for number, text in enumerate(_windows(stories, window, plan.texts)):
        stored = Stored.of(graphs, text[:held], RATIOS, plan.seed + number)
        later = text[held - 1 :]
        for form in stored.forms:
            # The first token behind the context is told by the context's last one, which is stored, not fed.
            scores = table.score(later[1:-1], later[2:], stored.back(form))
            loss[form] = loss.get(form, 0.0) - float(scores.sum(dtype="float64"))
            sizes[form] = stored.bytes_of(form)
        count += len(later) - 2
        _tell(progress, "perplexity", number + 1, plan.texts)
    values = {form: math.exp(each / count) for form, each in loss.items()}
    notes = {
        form: f"{value / values[EIGHT] - 1:+.2%} against {EIGHT}; {sizes[form] / held:,.0f} bytes per token; "
        f"{count:,} tokens"
        for form, value in values.items()
    }
    return compared(
        values, ours=OURS, case=f"text behind {held} stored tokens", metric="perplexity", unit="",
        notes=notes, lower_is_better=True,
    )  # fmt: skip


def _accuracy(
    engine: Engine, graphs: ContextGraphs, data: Path, held: int, plan: QualityPlan, progress: Progress | None
) -> list[Row]:
    examples = read_questions(TRACE_TASKS, data, plan.questions).examples
    end = end_of_turn_id(engine.tokenizer)
    right: dict[str, list[bool]] = {}
    asked = sum(len(each) for each in examples.values())
    done = 0
    for group in examples.values():
        said = [_said(engine, each, end) for each in group]
        for place, example in enumerate(group):
            done += 1
            question = branching(engine.tokenizer, example, end)
            # Before it the others of its task with their answers, the newest of them whole.
            history = [token for each in [*said[place + 1 :], *said[:place]] for token in each]
            whole = [*history, *question.trunk]
            # What does not fill a chunk is fed anew, the last token at least.
            tail = len(question.trunk) % graphs.chunk_tokens or graphs.chunk_tokens
            size = min(held, (len(whole) - tail) // graphs.chunk_tokens * graphs.chunk_tokens)
            if not 0 < len(question.trunk) - tail <= size:
                continue
            before, trunk = whole[-tail - size : -tail], whole[-tail:]
            stored = Stored.of(graphs, before, RATIOS, plan.seed + done)
            for form in stored.forms:
                back = stored.back(form)
                scores = [_score(graphs, copied(back), trunk, list(each)) for each in question.branches]
                chosen = example.options[int(np.argmax(scores))]
                right.setdefault(form, []).append(chosen == example.answer)
            _tell(progress, "questions", done, asked)
    if not right:
        raise ConfigError(
            f"no question is stored in whole chunks of {held} tokens; take a model of a longer window"
        )
    shares = {form: float(np.mean(each)) for form, each in right.items()}
    notes = {
        form: f"{np.mean(np.array(each) == np.array(right[EIGHT])):.1%} judged as by {EIGHT}; "
        f"{len(each)} questions of {', '.join(TRACE_TASKS)}"
        for form, each in right.items()
    }
    return compared(
        shares, ours=OURS, case=f"questions in up to {held} stored tokens", metric="accuracy", unit="share",
        notes=notes,
    )  # fmt: skip


def _passages(
    graphs: ContextGraphs, stories: list[int], held: int, plan: QualityPlan, progress: Progress | None
) -> list[Row]:
    table, size = graphs.table, graphs.chunk_tokens
    chunks, begun = held // size, round(_BEGUN_SHARE * size)
    gains: dict[str, list[float]] = {}
    texts = list(_windows(stories, held + size, plan.passages))
    for number, text in enumerate(texts):
        # All chunks in turn, spread over the context however few passages there are.
        at = size * (number * chunks // len(texts) if len(texts) < chunks else number % chunks)
        context, other = text[:held], text[held:]
        passage = context[at : at + size]

        def rest(cache: KVCache, passage: list[int] = passage) -> float:
            return float(table.score(passage[:-1], passage[1:], cache)[begun - 1 :].mean())

        without = Stored.of(graphs, [*context[:at], *other, *context[at + size :]], {}, plan.seed)
        unseen = rest(without.back(RAW))
        stored = Stored.of(graphs, context, RATIOS, plan.seed + number)
        for form in stored.forms:
            gains.setdefault(form, []).append(rest(stored.back(form)) - unseen)
        _tell(progress, "passages", number + 1, len(texts))
    values = {form: float(np.mean(each)) for form, each in gains.items()}
    notes = {}
    for form, each in gains.items():
        lost = np.array(each) - np.array(gains[EIGHT])
        notes[form] = (
            f"{lost.mean():+.4f} ± {lost.std() / math.sqrt(len(lost)):.4f} against {EIGHT}; {len(each)} "
            f"passages, in turn of {chunks} chunks"
        )
    return compared(
        values, ours=OURS, case=f"passage of {held} stored tokens begun again", metric="recall",
        unit="nats/token", notes=notes,
    )  # fmt: skip


def _score(graphs: ContextGraphs, cache: KVCache, trunk: list[int], branch: list[int]) -> float:
    """Log-probability of an answer behind the end of a question."""
    whole = [*trunk, *branch]
    scores = graphs.table.score(whole[:-1], whole[1:], cache)
    return float(scores[len(trunk) - 1 :].sum())


def _said(engine: Engine, example: TaskExample, end: int | None) -> list[int]:
    """A question with its right answer, as it stands in a context."""
    answer = engine.tokenizer.encode(example.answer, add_special_tokens=False)
    return [*prompt_ids(engine.tokenizer, example), *answer, *([] if end is None else [end])]


def _stories(engine: Engine, data: Path) -> list[int]:
    """All of the validation text as tokens."""
    from serving.console import read_text

    texts = [each.strip() for each in read_text(data / _TEXT).split(_SEPARATOR)]
    return [token for each in texts if each for token in engine.tokenizer.encode(each)]


def _windows(tokens: Sequence[int], length: int, count: int) -> Iterator[list[int]]:
    """So many pieces, spread over all of the text.

    Raises:
      ConfigError: there is too little text.
    """
    if len(tokens) < length:
        raise ConfigError(f"a text of {len(tokens)} tokens is too short for windows of {length}")
    step = (len(tokens) - length) // max(1, count - 1)
    for number in range(count):
        yield list(tokens[number * step : number * step + length])


def _tell(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)
