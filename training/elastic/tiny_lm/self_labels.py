"""Labels the tiny LM's decisions by an elastic model's own answers.

Self-induced labelling (ELMS, arXiv 2409.09071, section 3.3): every sub-model answers a question with a
right answer, with its prompt at every length. The label of a question under an SLO is the lightest choice
that meets the SLO and still answers right; if none does, the SLO's default: the largest sub-model that
meets it, with the longest prompt that does. `answer` finds the choices that answer right, `lightest` makes
labels from them; `jaxllm.training.elastic.tiny_lm.run` trains on them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.levels import Recovery
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, shared_sub_model, sub_config, sub_model
from jaxllm.elastic.slo import Slo, feasible, nominal_cost
from jaxllm.errors import ConfigError
from jaxllm.models.lora import adapt
from jaxllm.models.parameters import Params
from jaxllm.nn.documents import Branches
from jaxllm.steps.branching import Packed, cut, score_pieces
from jaxllm.steps.model import score_branches
from jaxllm.tasks.questions import Question, shorten
from jaxllm.text.tokenizer import Tokenizer

# Two lengths of rows, so two compilations per level: most questions are short.
SHORT_ROW_TOKENS = 256
DISPATCH_TOKENS = 2048

OnAnswered = Callable[[int, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ElasticModel:
    """A model with its sub-models.

    Attributes:
      cfg: of the whole model.
      params: its parameters, units in order.
      ladder: its levels.
      tokenizer: its own.
      recoveries: adapters by level.
    """

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
