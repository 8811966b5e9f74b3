"""Labels the tiny LM's decisions by an elastic model's own answers.

Self-induced labelling (ELMS, arXiv 2409.09071, section 3.3): every sub-model answers a question with a
right answer, with its prompt at every length. The label of a question under an SLO is the lightest choice
that meets the SLO and still answers right; if none does, the SLO's default: the largest sub-model that
meets it, with the longest prompt that does. `answer` finds the choices that answer right, `lightest` makes
labels from them; `jaxllm.training.elastic.tiny_lm.run` trains on them. Questions come from tasks, and an
elastic model's answers are stored on disk.
"""

import dataclasses
import functools
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.levels import Recovery
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, shared_sub_model, sub_config, sub_model
from jaxllm.elastic.slo import Slo, feasible, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.models.lora import adapt
from jaxllm.models.parameters import Params
from jaxllm.nn.documents import Branches
from jaxllm.steps.branching import Packed, cut, score_pieces
from jaxllm.steps.model import score_branches
from jaxllm.tasks import find_task
from jaxllm.tasks.example import TaskExample, held_out, pseudo_random
from jaxllm.tasks.questions import Question, shorten
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe

# Two lengths of rows, so two compilations per level: most questions are short.
SHORT_ROW_TOKENS = 256
DISPATCH_TOKENS = 2048

OnAnswered = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ElasticModel:
    """A model with its sub-models: parameters with units in order, levels, and adapters by level."""

    cfg: ModelConfig
    params: Params
    ladder: Ladder
    tokenizer: Tokenizer
    recoveries: Mapping[int, Recovery] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """Answers of sub-models to questions.

    Attributes:
      correct: `[N, levels, prompt_ratios]` bool.
      shares: `[N, prompt_ratios]` float64, share of each prompt's tokens that stayed: more than its ratio
        if more must stay.
    """

    correct: np.ndarray
    shares: np.ndarray


def lightest(
    correct: np.ndarray,
    slos: Sequence[Slo],
    levels: Sequence[int],
    prompt_ratios: Sequence[float],
    shares: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the label of every question under every SLO.

    Lighter means a lower nominal TTFT; of equal ones the smaller level is lighter, because its further
    tokens are faster.

    Args:
      correct: `[N, levels, prompt_ratios]` bool, choices that answer right.
      slos: S objectives.
      levels: levels in percent, ascending.
      prompt_ratios: prompt ratios, ascending.
      shares: `[N, prompt_ratios]`, share of the prompt's tokens that stay at each ratio; None for the
        ratios themselves.

    Returns:
      `[N, S, 2]` int32, the indices of the level and of the prompt ratio. If no choice meets an SLO, the
      lowest.

    Raises:
      ConfigError: `correct` has another shape, or levels or ratios do not ascend.
    """
    correct = np.asarray(correct, bool)
    if correct.ndim != 3 or correct.shape[1:] != (len(levels), len(prompt_ratios)):
        raise ConfigError(
            f"right answers must be [N, {len(levels)}, {len(prompt_ratios)}], got {correct.shape}"
        )
    for values in (levels, prompt_ratios):
        if list(values) != sorted(set(values)):
            raise ConfigError(f"levels and prompt ratios must ascend, got {list(values)}")
    allowed = allowed_choices(slos, levels, prompt_ratios, shares)
    allowed = np.broadcast_to(allowed, (len(correct), *allowed.shape[1:]))
    ttft, _ = nominal_cost(levels, prompt_ratios)
    places = np.arange(len(levels)).repeat(len(prompt_ratios))
    # Rounded, because 0.3 · 0.8 and 0.6 · 0.4 differ by a bit.
    order = np.lexsort((places, ttft.reshape(-1).round(9)))
    right = (allowed & correct[:, None]).reshape(*allowed.shape[:2], -1)[..., order]
    found = np.stack(np.divmod(order[right.argmax(-1)], len(prompt_ratios)), axis=-1)
    answered = np.any(right, axis=-1, keepdims=True)
    return np.where(answered, found, _default(allowed)).astype(np.int32)


def allowed_choices(
    slos: Sequence[Slo],
    levels: Sequence[int],
    prompt_ratios: Sequence[float],
    shares: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the choices that meet each SLO with the tokens left in prompts: `[N, S, levels,
    prompt_ratios]` bool.

    Arguments are those of `lightest`; without shares N is 1.
    """
    if shares is None:
        return np.stack([feasible(slo, levels, prompt_ratios) for slo in slos])[None]
    real = np.maximum(np.asarray(shares, np.float64), np.asarray(prompt_ratios))
    # One row of ratios for every question.
    flat = np.stack([feasible(slo, levels, real.reshape(-1).tolist()) for slo in slos])
    return flat.reshape(len(slos), len(levels), *real.shape).transpose(2, 0, 1, 3)


def answer(
    model: ElasticModel,
    questions: Sequence[Question],
    scores: Sequence[np.ndarray],
    *,
    levels: Sequence[int],
    prompt_ratios: Sequence[float],
    row_tokens: Sequence[int] = (),
    on_answered: OnAnswered | None = None,
) -> Answers:
    """Lets every sub-model answer questions, with their prompts at every length.

    An answer is right if the most likely option is; of equally likely ones the first counts.

    Args:
      model: elastic model with all of `levels`.
      questions: N questions.
      scores: `[T]` for each question, scores that tokens of its prompt are kept by (see `keep_tokens`).
      levels: levels in percent.
      prompt_ratios: shares of the prompt, in (0, 1].
      row_tokens: lengths of rows, ascending, one compilation for each and level; by default
        `SHORT_ROW_TOKENS` and the model's window.
      on_answered: callback for (level, tokens scored, number of tokens) after each dispatch.

    Raises:
      ConfigError: a question does not fit the longest row, or the model lacks a level.
    """
    window = model.cfg.window_tokens
    lengths = tuple(row_tokens) or (*(each for each in (SHORT_ROW_TOKENS,) if each < window), window)
    shortened = [
        shorten(model.tokenizer, question, each, prompt_ratios)
        for question, each in zip(questions, scores, strict=True)
    ]
    # The same tokens may stay at several ratios: such prompts are answered once.
    keys = [
        (number, each) for number, (prompts, _) in enumerate(shortened) for each in dict.fromkeys(prompts)
    ]
    asked = [each for _, each in keys]
    longest = max((each.longest_tokens for each in asked), default=0)
    if longest > lengths[-1]:
        raise ConfigError(f"a question has {longest} tokens with its answer, the model reads {lengths[-1]}")
    pieces = cut(asked, lengths)
    rows = {length: max(1, DISPATCH_TOKENS // length) for length in pieces}
    correct = np.zeros((len(questions), len(levels), len(prompt_ratios)), bool)
    for place, level in enumerate(levels):
        report = None if on_answered is None else functools.partial(on_answered, level)
        likely = score_pieces(asked, pieces, rows, _dispatcher(model, level), report)
        right = {key: questions[key[0]].is_right(each) for key, each in zip(keys, likely, strict=True)}
        for number, (prompts, _) in enumerate(shortened):
            correct[number, place] = [right[number, each] for each in prompts]
    return Answers(correct, np.array([shares for _, shares in shortened]).reshape(-1, len(prompt_ratios)))


def _default(allowed: np.ndarray) -> np.ndarray:
    """The largest level of `allowed` `[N, S, levels, prompt_ratios]`, and its largest ratio: `[N, S, 2]`."""
    level = _last(np.asarray(allowed.any(-1)))
    ratios = np.take_along_axis(allowed, level[..., None, None], axis=2)[:, :, 0]
    return np.stack([level, _last(ratios)], axis=-1)


def _last(flags: np.ndarray) -> np.ndarray:
    """Returns the index of the last True along the last axis; 0 if there is none."""
    last = flags.shape[-1] - 1 - flags[..., ::-1].argmax(-1)
    return np.where(flags.any(-1), last, 0)


def _dispatcher(model: ElasticModel, level: int) -> Callable[[Packed], np.ndarray]:
    """Scores dispatches by the sub-model of a level."""
    cfg = sub_config(model.cfg, model.ladder, level)
    params = shared_sub_model(model.params, cfg)
    recovery = model.recoveries.get(level, Recovery({}, 0.0))
    adapter = {name: jnp.asarray(value) for name, value in recovery.adapter.items()}

    def dispatch(packed: Packed) -> np.ndarray:
        out = _scores(
            params,
            adapter,
            packed.tokens,
            packed.starts,
            Branches(trunk_ends=packed.trunk_ends, starts=packed.branch_starts),  # pyright: ignore
            packed.scored,
            cfg=cfg,
            scaling=recovery.scaling,
        )
        return np.asarray(out)[: packed.count]

    return dispatch


@functools.partial(jax.jit, static_argnames=("cfg", "scaling"))
def _scores(params, adapter, *inputs, cfg: ModelConfig, scaling: float) -> jax.Array:
    whole = adapt(sub_model(params, cfg), adapter, scaling)
    return score_branches(whole, *inputs, cfg=cfg, dtype=jnp.dtype(jnp.float32))


# Number of questions whose answers are stored together.
SHARD_QUESTIONS = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """Questions on either side of a split.

    Attributes:
      all: of all tasks.
      held_out: `[N]` bool, by content, variants of one question together.
      numbers: `[N]` int, number within its task, from 0; the first ones are a fair sample of all.
    """

    all: list[Question]
    held_out: np.ndarray
    numbers: np.ndarray

    def first(self, count: int) -> "Questions":
        """The first `count` of each task."""
        chosen = self.numbers < count
        some = [each for each, taken in zip(self.all, chosen, strict=True) if taken]
        return Questions(some, self.held_out[chosen], self.numbers[chosen])


def read_questions(recipe: TinyLmRecipe, data: Path, tokenizer: Tokenizer, window_tokens: int) -> Questions:
    """Reads the questions of a recipe's tasks from their training splits.

    Args:
      recipe: the run.
      data: the folder of all data.
      tokenizer: the large model's.
      window_tokens: the large model's; questions longer than this with an answer are left out.

    Raises:
      ConfigError: a file is missing or malformed, or nothing is left on one side.
    """
    questions: list[Question] = []
    numbers: list[int] = []
    for name in recipe.tasks:
        task = find_task(name)
        # A fair sample, in an order that follows from the contents.
        examples = sorted(task.read(data, "train"), key=lambda each: pseudo_random(f"asked\0{each.user}"))
        wanted, taken = max(recipe.questions, recipe.used_questions), 0
        for example in examples:
            question = Question.read(tokenizer, example, per_byte=task.per_byte)
            if _longest_tokens(tokenizer, question) <= window_tokens:
                questions.append(question)
                numbers.append(taken)
                taken += 1
            if taken == wanted:
                break
    # Variants of one question share this text: some tasks repeat it with other options.
    keys = [f"{each.example.answer}\0{each.example.user.partition(chr(10))[0]}" for each in questions]
    sides = np.array([held_out(key, recipe.held_out_share) for key in keys], bool)
    found = Questions(questions, sides, np.array(numbers, int))
    for count in filter(None, (recipe.questions, recipe.used_questions)):
        own = found.first(count).held_out
        if own.all() or not own.any():
            raise ConfigError(
                f"of {len(own)} questions {own.sum()} are held out; there must be some on either side: ask "
                "more questions or change held_out_share"
            )
    return found


def questions_digest(questions: Sequence[Question]) -> str:
    """A hexadecimal name for questions as a model reads them."""
    return _digest(text.encode() for each in questions for text in (each.prompt.text, _as_text(each.example)))


def kept_answers(
    folder: Path,
    questions: Sequence[Question],
    scores: Sequence[np.ndarray],
    make: Callable[[Sequence[Question], Sequence[np.ndarray]], Answers],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Answers:
    """Reads answers from the files of a folder, or makes and stores them.

    There is a file for each `SHARD_QUESTIONS`: a large model needs hours, and a stopped run resumes after the
    last one.

    Args:
      folder: folder of the files, made if missing.
      questions: questions to answer.
      scores: scores that their prompts were shortened by; answers to other prompts are made anew.
      make: function that answers some questions.
      report: callback for (questions answered, all questions) after each shard.
    """
    folder.mkdir(exist_ok=True)
    parts = []
    for first in range(0, len(questions), SHARD_QUESTIONS):
        some = questions[first : first + SHARD_QUESTIONS], scores[first : first + SHARD_QUESTIONS]
        path, key = folder / f"{first}.npz", _answers_key(*some)
        parts.append(_kept(path, key, ("correct", "shares"), lambda some=some: vars(make(*some))))
        report(min(first + SHARD_QUESTIONS, len(questions)), len(questions))
    return Answers(*(np.concatenate([part[name] for part in parts]) for name in ("correct", "shares")))


def kept_support(
    path: Path, questions: Sequence[Question], make: Callable[[], list[np.ndarray]]
) -> list[np.ndarray]:
    """Reads tokens' support of right answers from a file, or measures it and writes the file.

    Args:
      path: of the file.
      questions: those to measure.
      make: measures (see `word_labels.token_support`).
    """
    found = _kept(path, questions_digest(questions), ("tokens",), lambda: {"tokens": np.concatenate(make())})
    ends = np.cumsum([len(each.prompt.ids) for each in questions])
    return np.split(found["tokens"], ends[:-1])


def _kept(
    path: Path, key: str, names: Sequence[str], make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Reads arrays that were stored under a key, or makes and stores them."""
    if path.exists():
        try:
            with np.load(path) as stored:
                if str(stored["key"]) == key:
                    return {name: stored[name] for name in names}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            # A damaged file is replaced.
            pass
    arrays = make()
    with atomic_file(path) as file:
        np.savez(file, key=np.array(key), **arrays)  # pyright: ignore[reportArgumentType]
    return arrays


def _answers_key(questions: Sequence[Question], scores: Sequence[np.ndarray]) -> str:
    rounded = (np.asarray(each, np.float32).round(4).tobytes() for each in scores)
    return f"{questions_digest(questions)} {_digest(rounded)}"


def _longest_tokens(tokenizer: Tokenizer, question: Question) -> int:
    # An upper bound: a tokenizer may join question and option; the end of an answer is one more.
    options = (
        tokenizer.encode(each, add_special_tokens=False, special=False) for each in question.example.options
    )
    return len(question.prompt.ids) + max(map(len, options)) + 1


def _as_text(example: TaskExample) -> str:
    """All of an example, field by field: the class may change, files of earlier runs must still be found."""
    names = ("user", "answer", "system", "options", "references", "form")
    return f"TaskExample({', '.join(f'{name}={getattr(example, name)!r}' for name in names)})"


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()
