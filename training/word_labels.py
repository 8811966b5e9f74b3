"""Which words of a question speak for its right answer: more labels for the tiny LM's score head.

Shorter versions of texts (`keep_labels.py`) tell what a reader would keep who knows no task. What of a prompt
an elastic model needs is for the model to say, as it labels its own decisions (`self_labels.py`). What each
token adds to the right answer's log-likelihood is found by integrated gradients (arXiv 1703.01365, equation
1): the words that may go come up together from the mean of all embeddings, which says nothing, to their own,
and on the way each has a share in what is gained. That tells what leaving out one word after another does, at
a fraction of its cost; a gradient at the whole question alone does not, since an answer that is sure hardly
changes with any one word. The label of a word is what it says beside the word of its question that says most.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.elastic.compression import NO_WORD, word_count, word_scores
from jaxllm.elastic.reading import MARKS, reading_rows
from jaxllm.errors import ConfigError
from jaxllm.linear import embed
from jaxllm.models import decoder
from jaxllm.models.parameters import Params
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question
from jaxllm.tasks.tiny_reader import TinyReader
from training.self_labels import ElasticModel
from training.tlm_batches import ScoreBatch

_SHORTEST_ROW = 64
_DISPATCH_TOKENS = 2048
# Places on the way at which the gradient is taken: more tell hardly more.
STEPS = 4
# Called with (questions done, questions in all).
OnMeasured = Callable[[int, int], None]


def token_support(
    model: ElasticModel,
    questions: Sequence[Question],
    *,
    steps: int = STEPS,
    on_measured: OnMeasured | None = None,
) -> list[np.ndarray]:
    """How much each token of each question's prompt speaks for the whole model's right answer.

    Args:
      model: the elastic model.
      questions: with options.
      steps: places on the way from the mean embedding to the token's own.
      on_measured: called after each dispatch.

    Returns:
      Of each question `[T]` float32, in nats, less than 0 where a token speaks against it; 0 for what must
      stay. With enough steps they add up to what all of them together change.

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
    """Questions as rows whose words are labelled by their support: 1 for what speaks most for the answer, 0
    for what says nothing or speaks against it.

    Args:
      questions: N.
      support: of each question's tokens (see `token_support`).
      reader: of rows.
      source: the number of these rows' source.
      weight: of each label.

    Raises:
      ConfigError: in no question may more than one word go.
    """
    parts = []
    for question, each in zip(questions, support, strict=True):
        prompt = reader.tokens(question.prompt)
        wanted, known = _shares(question, each, word_count(prompt.text, prompt.boundaries))
        counted = (prompt.words != NO_WORD) & ~prompt.forced
        counted[counted] = known[prompt.words[counted]]
        if not counted.any():
            continue
        tokens, mask = reading_rows(prompt.ids, reader.row_tokens)
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
    """Each word's support beside the most, `[count]` float32 in [0, 1], and which words may go."""
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
    """A question with its right answer: `[T]` tokens, which of them may go, and how many the answer has."""

    tokens: np.ndarray
    free: np.ndarray
    answer: int


def _asked(model: ElasticModel, question: Question) -> _Asked:
    both = branching(model.tokenizer, question.example)
    answer = both.branches[question.example.options.index(question.example.answer)]
    tokens, free = np.array([*both.trunk, *answer], np.int32), ~question.prompt.forced
    # A tokenizer may join the prompt's end to an option's beginning: options are scored from before that.
    shared = min(len(both.trunk), len(free))
    return _Asked(tokens, np.append(free[:shared], np.zeros(len(tokens) - shared, bool)), len(answer))


def _row_length(tokens: int, window: int) -> int:
    """The shortest row that holds so many tokens: some lengths for all, so that there are few graphs.

    What is predicted is not read, so a row needs one token less.
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
    """`[rows, length]` float32, of which the first are those asked."""
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
    # Every token has a row of the table for itself, so that its gradient is its own.
    dtype = jnp.dtype(jnp.float32)
    table = embed(tokens.reshape(-1), params["embed.tokens"], dtype)
    words = embed(jnp.arange(cfg.vocab_size, dtype=jnp.int32), params["embed.tokens"], dtype)
    places = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
    change = jnp.where(free.reshape(-1, 1), table - words.mean(0), 0)

    def likely(table: jax.Array) -> jax.Array:
        hidden = decoder.forward_documents({**params, "embed.tokens": table}, places, cfg=cfg)
        logs = jax.nn.log_softmax(decoder.logits(params, hidden, cfg=cfg))
        return jnp.sum(jnp.take_along_axis(logs, targets[..., None], -1)[..., 0] * weights)

    def step(place: jax.Array) -> jax.Array:
        return jax.grad(likely)(table - (np.float32(1) - place) * change)

    way = (np.arange(steps, dtype=np.float32) + np.float32(0.5)) / np.float32(steps)
    mean = jax.lax.map(step, jnp.asarray(way)).mean(0)
    return (mean * change).sum(-1).reshape(tokens.shape)
