"""Labels the words of a question that support its right answer, for the tiny LM's score head.

Shortened texts (`keep_labels`) show which words people keep without knowing the task. The words that an
elastic model needs follow from the model itself, as its decisions do (`self_labels`). Each token's
contribution to the right answer's log-likelihood is found by integrated gradients (arXiv 1703.01365,
equation 1): the embeddings of droppable words move together from the mean of all embeddings, which is
uninformative, to their own, and each word has its share in the gain. That approximates leaving out one word
after another at a fraction of the cost; a gradient at only the whole question does not, since a confident
answer hardly changes with any one word. The label of a word is its support divided by the largest in its
question.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.compression import MARKS, NO_WORD, input_rows, word_count, word_scores
from jaxllm.errors import ConfigError
from jaxllm.models import decoder
from jaxllm.models.parameters import Params
from jaxllm.nn.linear import embed
from jaxllm.tasks.questions import Question, branching
from jaxllm.tasks.tiny_reader import TinyReader
from jaxllm.training.elastic.tiny_lm.batches import ScoreBatch
from jaxllm.training.elastic.tiny_lm.self_labels import ElasticModel

_SHORTEST_ROW = 64
_DISPATCH_TOKENS = 2048
# Number of points of the gradient; more hardly change the result.
STEPS = 4
# Callback for (questions done, number of questions).
OnMeasured = Callable[[int, int], None]


def token_support(
    model: ElasticModel,
    questions: Sequence[Question],
    *,
    steps: int = STEPS,
    on_measured: OnMeasured | None = None,
) -> list[np.ndarray]:
    """Measures how much each token of a question's prompt supports the whole model's right answer.

    Args:
      model: the elastic model.
      questions: questions with options.
      steps: number of points on the way from the mean embedding to the token's own.
      on_measured: callback after each dispatch.

    Returns:
      `[T]` float32 for each question, in nats, below 0 for tokens against the answer, and 0 for those that
      must stay. With enough steps their sum is the joint effect of all tokens.

    Raises:
      ConfigError: a question is longer than the model's window, or the model's loss is not finite.
    """
    asked = [_asked(model, question) for question in questions]
    lengths = [_row_length(len(each.tokens), model.cfg.window_tokens) for each in asked]
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(questions)
    done = 0
    for length in sorted(set(lengths)):
        places = [place for place, own in enumerate(lengths) if own == length]
        rows = max(1, _DISPATCH_TOKENS // length)
        for first in range(0, len(places), rows):
            some = places[first : first + rows]
            support = _support_of_rows(model, [asked[place] for place in some], rows, length, steps)
            for place, row in zip(some, support, strict=False):
                found[place] = row[: len(questions[place].prompt.ids)]
            done += len(some)
            if on_measured is not None:
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
      reader: reader of rows.
      source: number of these rows' source.
      weight: weight of each label.

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
        tokens, mask = input_rows(prompt.ids, reader.row_tokens)
        labels, weights = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.float32)
        text = mask.copy()
        text[:, :MARKS] = False
        labels[text] = np.where(counted, wanted[prompt.words], 0)
        weights[text] = np.float32(weight) * counted
        parts.append((tokens, mask, labels, weights, np.full(tokens.shape, source, np.int32)))
    if not parts:
        raise ConfigError("no question has words to choose from; the score head cannot learn from them")
    return ScoreBatch(*(np.concatenate([part[field] for part in parts]) for field in range(5)))


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """A question with its right answer: `[T]` tokens, which are droppable, and the answer's length."""

    tokens: np.ndarray
    free: np.ndarray
    answer: int


def _asked(model: ElasticModel, question: Question) -> _Asked:
    both = branching(model.tokenizer, question.example)
    answer = both.branches[question.example.options.index(question.example.answer)]
    tokens, free = np.array([*both.trunk, *answer], np.int32), ~question.prompt.forced
    # A tokenizer may join the prompt's end to an option's beginning: options are scored from before the join.
    shared = min(len(both.trunk), len(free))
    return _Asked(tokens, np.append(free[:shared], np.zeros(len(tokens) - shared, bool)), len(answer))


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


def _support_of_rows(
    model: ElasticModel, asked: Sequence[_Asked], rows: int, length: int, steps: int
) -> np.ndarray:
    """Returns `[rows, length]` float32; the first rows are those asked."""
    tokens, targets = np.zeros((2, rows, length), np.int32)
    free, weights = np.zeros((rows, length), bool), np.zeros((rows, length), np.float32)
    for row, each in enumerate(asked):
        fed = len(each.tokens) - 1
        tokens[row, :fed], targets[row, :fed] = each.tokens[:-1], each.tokens[1:]
        free[row, :fed] = each.free[:-1]
        weights[row, fed - each.answer : fed] = 1
    return np.asarray(_support(model.params, tokens, targets, free, weights, cfg=model.cfg, steps=steps))


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
