"""Labels the tiny LM's decisions by an elastic model's own answers, and words by their support of right ones.

Self-induced labelling (ELMS, arXiv 2409.09071, section 3.3): every sub-model answers a question with a
right answer, with its prompt at every length. The label of a question under an SLO is the lightest choice
that meets the SLO and still answers right; if none does, the SLO's default: the largest sub-model that
meets it, with the longest prompt that does. `answer` finds the choices that answer right, `lightest` makes
labels from them. Questions come from tasks, and an elastic model's answers are stored on disk.

Shortened texts show which words people keep without knowing the task. The words that an elastic model needs
follow from the model itself, as its decisions do. Each token's contribution to the right answer's
log-likelihood is found by integrated gradients (arXiv 1703.01365, equation 1): the embeddings of droppable
words move together from the mean of all embeddings, which is uninformative, to their own, and each word has
its share in the gain. That approximates leaving out one word after another at a fraction of the cost; a
gradient at only the whole question does not, since a confident answer hardly changes with any one word. The
label of a word is its support divided by the largest in its question.
"""

import dataclasses
import functools
import hashlib
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.levels import Recovery
from jaxllm.config import ModelConfig
from jaxllm.elastic.compression import NO_WORD, word_count, word_scores
from jaxllm.elastic.ladder import Ladder, shared_sub_model, sub_config, sub_model
from jaxllm.elastic.slo import Slo, feasible, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.models import decoder
from jaxllm.models.lora import adapt
from jaxllm.models.parameters import Params
from jaxllm.nn.documents import Branches
from jaxllm.nn.linear import embed
from jaxllm.steps.branching import Dispatch, Packed, cut, score_pieces
from jaxllm.steps.model import score_branches
from jaxllm.tasks import find_task
from jaxllm.tasks.example import held_out, pseudo_random
from jaxllm.tasks.questions import Question, branching, shorten
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.training.elastic.tiny_lm.recipe import TinyLmRecipe
from jaxllm.training.elastic.tiny_lm.rows import ScoreBatch, joined, labelled_rows

# Two lengths of rows, so two compilations per level: most questions are short.
SHORT_ROW_TOKENS = 256
DISPATCH_TOKENS = 2048


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
    # By default the largest level that is allowed, and its largest ratio.
    level = _last(np.asarray(allowed.any(-1)))
    ratio = _last(np.take_along_axis(allowed, level[..., None, None], axis=2)[:, :, 0])
    return np.where(answered, found, np.stack([level, ratio], axis=-1)).astype(np.int32)


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
) -> Answers:
    """Lets every sub-model answer questions, with their prompts at every length.

    An answer is right if the most likely option is; of equally likely ones the first counts.

    Args:
      model: elastic model with all of `levels`.
      questions: N questions.
      scores: `[T]` for each question, scores that tokens of its prompt are kept by (see `keep_tokens`).
      levels: levels in percent.
      prompt_ratios: shares of the prompt, in (0, 1].

    Raises:
      ConfigError: a question does not fit the model's window, or the model lacks a level.
    """
    window = model.cfg.window_tokens
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
    if longest > window:
        raise ConfigError(f"a question has {longest} tokens with its answer, the model reads {window}")
    # A power of two: a window can be much longer than any question.
    row = min(1 << max(longest - 1, 0).bit_length(), window)
    pieces = cut(asked, tuple(sorted({min(SHORT_ROW_TOKENS, row), row})))
    rows = {length: max(1, DISPATCH_TOKENS // length) for length in pieces}
    correct = np.zeros((len(questions), len(levels), len(prompt_ratios)), bool)
    for place, level in enumerate(levels):
        likely = score_pieces(asked, pieces, rows, _dispatcher(model, level))
        right = {key: questions[key[0]].is_right(each.sums) for key, each in zip(keys, likely, strict=True)}
        for number, (prompts, _) in enumerate(shortened):
            correct[number, place] = [right[number, each] for each in prompts]
    return Answers(correct, np.array([shares for _, shares in shortened]).reshape(-1, len(prompt_ratios)))


def _last(flags: np.ndarray) -> np.ndarray:
    """Returns the index of the last True along the last axis; 0 if there is none."""
    last = flags.shape[-1] - 1 - flags[..., ::-1].argmax(-1)
    return np.where(flags.any(-1), last, 0)


def _dispatcher(model: ElasticModel, level: int) -> Dispatch:
    """Scores dispatches by the sub-model of a level."""
    cfg = sub_config(model.cfg, model.ladder, level)
    params = shared_sub_model(model.params, cfg)
    recovery = model.recoveries.get(level, Recovery({}, 0.0))
    adapter = {name: jnp.asarray(value) for name, value in recovery.adapter.items()}

    def dispatch(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
        scores, likeliest = _scores(
            params,
            adapter,
            packed.tokens,
            packed.starts,
            Branches(trunk_ends=packed.trunk_ends, starts=packed.branch_starts),  # pyright: ignore
            packed.scored,
            cfg=cfg,
            scaling=recovery.scaling,
        )
        return np.asarray(scores)[: packed.count], np.asarray(likeliest)[: packed.count]

    return dispatch


@functools.partial(jax.jit, static_argnames=("cfg", "scaling"))
def _scores(params: Params, adapter: Any, *inputs: Any, cfg: ModelConfig, scaling: float) -> Any:
    whole = adapt(sub_model(params, cfg), adapter, scaling)
    return score_branches(whole, *inputs, cfg=cfg, dtype=jnp.dtype(jnp.float32))


# Number of questions whose answers are stored together.
SHARD_QUESTIONS = 512


@dataclasses.dataclass(frozen=True, eq=False)
class Questions:
    """Questions on either side of a split.

    Attributes:
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
            # An upper bound: a tokenizer may join question and option; the end of an answer is one more.
            options = tokenizer.encode_many(example.options, add_special_tokens=False, special=False)
            if len(question.prompt.ids) + max(map(len, options)) + 1 <= window_tokens:
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
    return _digest(text.encode() for each in questions for text in (each.prompt.text, repr(each.example)))


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
        rounded = (np.asarray(each, np.float32).round(4).tobytes() for each in some[1])
        path, key = folder / f"{first}.npz", f"{questions_digest(some[0])} {_digest(rounded)}"
        parts.append(_kept(path, key, ("correct", "shares"), lambda some=some: vars(make(*some))))
        report(min(first + SHARD_QUESTIONS, len(questions)), len(questions))
    return Answers(*(np.concatenate([part[name] for part in parts]) for name in ("correct", "shares")))


def kept_support(
    path: Path, questions: Sequence[Question], make: Callable[[], list[np.ndarray]]
) -> list[np.ndarray]:
    """Reads tokens' support of right answers from a file, or measures it and writes the file."""
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


def _digest(parts: Iterable[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


_SHORTEST_ROW = 64
# Number of points of the gradient; more hardly change the result.
STEPS = 4


def token_support(
    model: ElasticModel,
    questions: Sequence[Question],
    *,
    steps: int = STEPS,
    on_measured: Callable[[int, int], None] = lambda done, total: None,
) -> list[np.ndarray]:
    """Measures how much each token of a question's prompt supports the whole model's right answer.

    Args:
      model: the elastic model.
      steps: number of points on the way from the mean embedding to the token's own.
      on_measured: callback for (questions done, all questions) after each dispatch.

    Returns:
      `[T]` float32 for each question, in nats, below 0 for tokens against the answer, and 0 for those that
      must stay. With enough steps their sum is the joint effect of all tokens.

    Raises:
      ConfigError: a question is longer than the model's window, or the model's loss is not finite.
    """
    asked = [_asked(model, question) for question in questions]
    lengths = [_row_length(len(tokens), model.cfg.window_tokens) for tokens, _, _ in asked]
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(questions)
    done = 0
    for length in sorted(set(lengths)):
        places = [place for place, own in enumerate(lengths) if own == length]
        rows = max(1, DISPATCH_TOKENS // length)
        for first in range(0, len(places), rows):
            some = places[first : first + rows]
            tokens, targets = np.zeros((2, rows, length), np.int32)
            free, weights = np.zeros((rows, length), bool), np.zeros((rows, length), np.float32)
            for row, (read, droppable, answer) in enumerate(asked[place] for place in some):
                fed = len(read) - 1
                tokens[row, :fed], targets[row, :fed] = read[:-1], read[1:]
                free[row, :fed] = droppable[:-1]
                weights[row, fed - answer : fed] = 1
            inputs = tokens, targets, free, weights
            support = np.asarray(_support(model.params, *inputs, cfg=model.cfg, steps=steps))
            for place, row in zip(some, support, strict=False):
                found[place] = row[: len(questions[place].prompt.ids)]
            done += len(some)
            on_measured(done, len(questions))
    if not all(np.isfinite(each).all() for each in found):
        raise ConfigError("the model's loss of right answers is not finite; its weights are broken")
    return found


def question_score_rows(
    questions: Sequence[Question],
    support: Sequence[np.ndarray],
    reader: TinyReader,
    *,
    source: int,
    weight: float = 1.0,
) -> ScoreBatch:
    """Makes rows of questions with words labelled by their support: 1 for the word that supports the answer
    most, 0 for words without support or against it.

    Args:
      questions: N questions.
      support: support of each question's tokens (see `token_support`).
      source: number of these rows' source.

    Raises:
      ConfigError: no question has more than one droppable word.
    """
    parts = []
    for question, each in zip(questions, support, strict=True):
        prompt = reader.tokens(question.prompt)
        wanted, known = _shares(question, each, word_count(prompt.text, prompt.boundaries))
        counted = (prompt.words != NO_WORD) & ~prompt.forced
        counted[counted] = known[prompt.words[counted]]
        if not counted.any():
            continue
        labels, weights = np.where(counted, wanted[prompt.words], 0), np.float32(weight) * counted
        parts.append(labelled_rows(prompt.ids, reader.row_tokens, labels, weights, source))
    if not parts:
        raise ConfigError("no question has words to choose from; the score head cannot learn from them")
    return joined(*parts)


def _shares(question: Question, support: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each word's support divided by the largest, `[count]` float32 in [0, 1], and which words are
    droppable."""
    prompt = question.prompt
    of_words = np.maximum(word_scores(support, prompt.words, count, missing=0.0), 0)
    text = prompt.words != NO_WORD
    known = np.zeros(count, bool)
    known[prompt.words[text & ~prompt.forced]] = True
    known[prompt.words[text & prompt.forced]] = False
    if known.sum() < 2:
        known[:] = False
    most = max(of_words[known].max(initial=0), np.finfo(np.float32).tiny)
    return np.where(known, of_words / most, 0).astype(np.float32), known


def _asked(model: ElasticModel, question: Question) -> tuple[np.ndarray, np.ndarray, int]:
    """A question with its right answer: `[T]` tokens, which are droppable, and the answer's length."""
    both = branching(model.tokenizer, question.example)
    answer = both.branches[question.example.options.index(question.example.answer)]
    tokens, free = np.array([*both.trunk, *answer], np.int32), ~question.prompt.forced
    # A tokenizer may join the prompt's end to an option's beginning: options are scored from before the join.
    shared = min(len(both.trunk), len(free))
    return tokens, np.append(free[:shared], np.zeros(len(tokens) - shared, bool)), len(answer)


def _row_length(tokens: int, window: int) -> int:
    """Returns the length of the shortest row for so many tokens: few lengths, so that there are few
    compilations.

    The last token is predicted and never an input, so a row needs one token less.
    """
    length = min(_SHORTEST_ROW, window)
    while length < tokens - 1 and length < window:
        length = min(2 * length, window)
    if length < tokens - 1:
        raise ConfigError(f"a question has {tokens - 1} tokens with its answer, the model reads {window}")
    return length


@functools.partial(jax.jit, static_argnames=("cfg", "steps"))
def _support(
    params: Params,
    tokens: jax.Array,
    targets: jax.Array,
    free: jax.Array,
    weights: jax.Array,
    *,
    cfg: ModelConfig,
    steps: int,
) -> jax.Array:
    # Every position has an embedding row of its own, and so a gradient of its own.
    dtype = jnp.dtype(jnp.float32)
    embedded = embed(tokens.reshape(-1), params["embed.tokens"], dtype)
    words = embed(jnp.arange(cfg.vocab_size, dtype=jnp.int32), params["embed.tokens"], dtype)
    places = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
    change = jnp.where(free.reshape(-1, 1), embedded - words.mean(0), 0)

    def likely(embedded: jax.Array) -> jax.Array:
        hidden = decoder.forward_documents({**params, "embed.tokens": embedded}, places, cfg=cfg)
        logs = jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg))
        return jnp.sum(jnp.take_along_axis(logs, targets[..., None], -1)[..., 0] * weights)

    def step(fraction: jax.Array) -> jax.Array:
        return jax.grad(likely)(embedded - (np.float32(1) - fraction) * change)

    fractions = (np.arange(steps, dtype=np.float32) + np.float32(0.5)) / np.float32(steps)
    mean = jax.lax.map(step, jnp.asarray(fractions)).mean(0)
    return (mean * change).sum(-1).reshape(tokens.shape)
