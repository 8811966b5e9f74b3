"""Token trees in compiled steps: growth, acceptance, calibrated probabilities (LLMCad, arXiv 2309.04255,
section 3.2)."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import shaped
from jaxllm.sampling import SamplerState, likeliest, sample
from jaxllm.speculation.growth import BRANCH_CONFIDENCE, Pacer
from jaxllm.speculation.token_tree import TokenTree

# Steps accept it as a tree of arrays.
jax.tree_util.register_dataclass(TokenTree)


@shaped(root="int32")
def new_tree(root: jax.Array, room: int) -> TokenTree:
    """A tree with only a root.

    Args:
      root: int32 scalar, the root's token.
      room: maximum number of nodes of the tree (M), at least 1.
    """
    first = jnp.arange(room, dtype=jnp.int32) == 0
    return TokenTree(
        tokens=jnp.where(first, root, 0),
        parents=jnp.full(room, -1, jnp.int32),
        depths=jnp.zeros(room, jnp.int32),
        confidences=first.astype(jnp.float32),
        probabilities=first.astype(jnp.float32),
        ancestors=first[:, None] & first,
        count=jnp.ones((), jnp.int32),
    )


def line_tree(tokens: Sequence[int]) -> TokenTree:
    """A tree of one branch, whose nodes are positioned like decoded tokens."""
    count = len(tokens)
    return TokenTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.arange(-1, count - 1, dtype=jnp.int32),
        depths=jnp.arange(count, dtype=jnp.int32),
        confidences=jnp.ones(count),
        probabilities=jnp.ones(count),
        ancestors=jnp.tril(jnp.ones((count, count), bool)),
        count=jnp.asarray(count, jnp.int32),
    )


@shaped(
    parents="int32 T", tokens="int32 T", confidences="float32 T", wanted="bool T", probabilities="float32 T"
)
def add_nodes(
    tree: TokenTree,
    parents: jax.Array,
    tokens: jax.Array,
    confidences: jax.Array,
    wanted: jax.Array,
    probabilities: jax.Array,
) -> TokenTree:
    """Adds nodes after the existing ones, as many as fit.

    Args:
      parents: `[T]` int32, nodes in use.
      tokens: `[T]` int32.
      confidences: `[T]` float32, confidence of each token given its parent.
      wanted: `[T]` bool; the others are left out.
      probabilities: `[T]` float32 (see `TokenTree`).
    """
    place = tree.count + jnp.cumsum(wanted.astype(jnp.int32)) - 1
    fits = wanted & (place < tree.room)
    # Node M does not exist: `mode="drop"` drops nodes that do not fit.
    at = jnp.where(fits, place, tree.room)
    behind = jnp.maximum(parents, 0)
    index = jnp.arange(tree.room, dtype=jnp.int32)

    def put(values: jax.Array, new: jax.Array) -> jax.Array:
        return values.at[at].set(new.astype(values.dtype), mode="drop")

    return TokenTree(
        tokens=put(tree.tokens, tokens),
        parents=put(tree.parents, parents),
        depths=put(tree.depths, tree.depths[behind] + 1),
        confidences=put(tree.confidences, tree.confidences[behind] * confidences),
        probabilities=put(tree.probabilities, probabilities),
        ancestors=put(tree.ancestors, tree.ancestors[behind] | (at[:, None] == index)),
        count=tree.count + jnp.sum(fits, dtype=jnp.int32),
    )


@shaped(chosen="int32 M")
def accepted_nodes(tree: TokenTree, chosen: jax.Array) -> jax.Array:
    """The accepted nodes, `[M]` bool: the root, and each node that, like all of its ancestors, is the
    target's token after its parent.

    Args:
      chosen: `[M]` int32, the target's token after each node.
    """
    as_chosen = (tree.tokens == chosen[jnp.maximum(tree.parents, 0)]) | (tree.parents < 0)
    wrong = tree.ancestors & ~as_chosen
    return tree.used & ~jnp.any(wrong, axis=1)


@shaped(accepted="bool M")
def deepest(tree: TokenTree, accepted: jax.Array) -> jax.Array:
    """The deepest of the nodes that are `accepted` (`[M]` bool), the first of equals: int32 scalar."""
    return jnp.argmax(jnp.where(accepted, tree.depths, -1)).astype(jnp.int32)


@shaped(node="int32")
def path_to(tree: TokenTree, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nodes from the root to `node` (int32 scalar), in order.

    Returns:
      `[M]` int32, and the number of them on the path; the others repeat the last one.
    """
    on_path = tree.ancestors[node]
    nodes = jnp.nonzero(on_path, size=tree.room, fill_value=np.iinfo(np.int32).max)[0].astype(jnp.int32)
    return jnp.minimum(nodes, node), jnp.sum(on_path, dtype=jnp.int32)


# Calibrates a drafter's probabilities by the target's acceptance, while it answers.
#
# The meaning of a token's probability depends on drafter and sampler: a target at fewer bits is
# underconfident, a small model overconfident, and under a sampler both differ again. So outcomes are
# counted by the rank of a token among the drafter's choices and by its probability. Each cell of the counts
# shifts log-odds by the ratio of accepted to predicted; between the centres of two cells shifts are
# interpolated, so that the order of branches is preserved. Without counts nothing is shifted.


# Ranks with counts of their own, the last for all further ones; centres of cells, in log-odds.
RANKS = 3
_FIRST, _APART, CELLS = -8.0, 2.0, 9
_CENTRES = _FIRST + _APART * np.arange(CELLS)
# Weight of the prior in outcomes, and the maximum number of remembered ones: texts change.
_PRIOR, _MEMORY = 8.0, 200.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Outcomes by rank and probability, older ones fading.

    Attributes:
      seen: `[RANKS, CELLS]` float64, number of drafted tokens whose parent was accepted.
      promised: `[RANKS, CELLS]` float64, the sum of their probabilities.
      accepted: `[RANKS, CELLS]` float64, number of accepted ones.
    """

    seen: np.ndarray
    promised: np.ndarray
    accepted: np.ndarray

    @classmethod
    def fresh(cls) -> Self:
        """No outcomes."""
        return cls(*(np.zeros((RANKS, CELLS)) for _ in range(3)))

    def after(self, ranks: np.ndarray, probabilities: np.ndarray, accepted: np.ndarray) -> "Calibration":
        """The counts after further outcomes.

        Args:
          ranks: `[n]` int, from 0 on.
          probabilities: `[n]`, of the drafter.
          accepted: `[n]` bool.
        """
        place = (_log_odds(probabilities) - _FIRST) / _APART
        cells = np.minimum(ranks, RANKS - 1), np.clip(np.rint(place), 0, CELLS - 1).astype(np.int64)
        counts = [self.seen.copy(), self.promised.copy(), self.accepted.copy()]
        for count, new in zip(counts, (1.0, probabilities, accepted), strict=True):
            np.add.at(count, cells, new)
        kept = _MEMORY / np.maximum(counts[0], _MEMORY)
        return Calibration(*(count * kept for count in counts))

    def shifts(self) -> np.ndarray:
        """Shifts of log-odds, `[RANKS, CELLS]` float32 (see `calibrated`)."""
        centres = 1 / (1 + np.exp(-_CENTRES))
        weight = self.seen + _PRIOR
        promised = (self.promised + _PRIOR * centres) / weight
        accepted = (self.accepted + _PRIOR * promised) / weight
        return (_log_odds(accepted) - _log_odds(promised)).astype(np.float32)


@shaped(probabilities="float32 T *", shifts=f"float32 {RANKS} {CELLS}")
def calibrated(probabilities: jax.Array, shifts: jax.Array) -> jax.Array:
    """The probabilities that the target accepts the most likely tokens, given that it accepted their parent.

    Args:
      probabilities: `[T, *]` float32, the drafter's for the most likely tokens after T nodes, falling.
      shifts: `[RANKS, CELLS]` float32 (see `Calibration.shifts`).

    Returns:
      `[T, *]` float32, below 1.
    """
    least = np.float32(1 / (1 + np.exp(-_FIRST)))
    bounded = jnp.clip(probabilities, least, 1 - least)
    odds = jnp.log(bounded) - jnp.log1p(-bounded)
    place = (odds - np.float32(_FIRST)) / np.float32(_APART)
    before = jnp.clip(place.astype(jnp.int32), 0, CELLS - 2)
    share = place - before.astype(jnp.float32)
    ranks = jnp.minimum(jnp.arange(probabilities.shape[1], dtype=jnp.int32), RANKS - 1)[None]
    shift = (1 - share) * shifts[ranks, before] + share * shifts[ranks, before + 1]
    # Values out of bounds keep their distance to them, so that unlikely tokens stay in order.
    return jax.nn.sigmoid(odds + shift) * jnp.minimum(probabilities / bounded, np.float32(1))


def outcomes(tree: TokenTree, path: Sequence[int], token: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcomes of a verified tree: the arguments of `Calibration.after`.

    Args:
      tree: tree on the host.
      path: the accepted nodes, from the root on.
      token: the target's token after them.

    Returns:
      Ranks `[n]` int64, probabilities `[n]` and acceptance `[n]` bool of all children of accepted nodes.
    """
    count = int(tree.count)
    parents, tokens = np.asarray(tree.parents)[:count], np.asarray(tree.tokens)[:count]
    probabilities = np.asarray(tree.probabilities)[:count].astype(np.float64)
    taken = dict(zip(path, [*(int(tokens[node]) for node in path[1:]), token], strict=True))
    children = np.flatnonzero(np.isin(parents, path))
    family, own = parents[children], probabilities[children]
    # Siblings are in the order of nodes, so that of equally likely ones the first ranks higher.
    surer = (own[None] > own[:, None]) | ((own[None] == own[:, None]) & (children[None] < children[:, None]))
    ranks = ((family[None] == family[:, None]) & surer).sum(axis=1)
    right = np.array([tokens[node] == taken[int(parents[node])] for node in children], bool)
    return ranks, own, right


def _log_odds(probabilities: np.ndarray) -> np.ndarray:
    least = 1 / (1 + np.exp(-_FIRST))
    bounded = np.clip(probabilities, least, 1 - least)
    return np.log(bounded) - np.log1p(-bounded)


# Chooses the branch of a token tree that grows next, and its new nodes (LLMCad, section 3.2).
#
# The cumulative confidence of a branch is the draft's probability that all of its tokens are right. Ours
# grows the branch with the highest confidence first: the expected number of accepted tokens is the sum of
# the nodes' confidences, and growing can only lower them. As published, tokens are divided among branches
# in proportion to their confidences (max-min fairness, equations 1 and 2; see `missing_tokens`). If the
# draft gives several tokens a high probability, the branch divides.


@shaped(fed="bool M")
def next_tips(
    tree: TokenTree,
    fed: jax.Array,
    count: int,
    *,
    pacer: Pacer = "confidence",
    least: jax.Array | float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The nodes that the draft extends next.

    Args:
      fed: `[M]` bool, nodes that the draft has extended.
      count: number of nodes to choose.
      pacer: the order of choice.
      least: float32 scalar; branches are left out unless they are more confident.

    Returns:
      `[count]` int32, ascending, and the number of valid ones (the others repeat the last node).
    """
    if pacer == "confidence":
        rank = tree.confidences
    elif pacer == "fair":
        rank = missing_tokens(tree, fed)
    else:
        rank = -jnp.arange(tree.room, dtype=jnp.float32)
    able = tree.used & ~fed & (tree.confidences > least)
    most, nodes = jax.lax.top_k(jnp.where(able, rank, -jnp.inf), count)
    there = most > -jnp.inf
    chosen = jnp.sort(jnp.where(there, nodes, tree.room - 1).astype(jnp.int32))
    return chosen, jnp.sum(there, dtype=jnp.int32)


@shaped(fed="bool M")
def missing_tokens(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """The number of tokens that each branch lacks of its share of all drafted ones: f of equation 1.

    f(x) = N · C_x / Σ C_i - T_x, where N is the number of drafted tokens (the paper's M), C_i the
    cumulative confidence of branch i and T_x the number of tokens of branch x. Equation 2 uses the minimum
    f as the objective of max-min fairness: a token to branch x subtracts one from its f, so the branch with
    the largest f gets the next one.

    Args:
      fed: `[M]` bool, as in `next_tips`; the branches end in the other nodes.

    Returns:
      `[M]` float32 of the nodes in which branches end, undefined elsewhere.
    """
    whole = jnp.sum(jnp.where(tree.used & ~fed, tree.confidences, 0.0))
    # Confidences may be as small as the smallest float, and their sum 0.
    shares = tree.confidences / jnp.maximum(whole, np.finfo(np.float32).tiny)
    return (tree.count - 1).astype(jnp.float32) * shares - tree.depths.astype(jnp.float32)


@shaped(tips="int32 T", valid="int32", probabilities="float32 T V")
def grow(
    tree: TokenTree,
    tips: jax.Array,
    valid: jax.Array,
    probabilities: jax.Array,
    shifts: jax.Array | np.ndarray,
    *,
    branches: int,
    threshold: float = BRANCH_CONFIDENCE,
) -> TokenTree:
    """Adds the draft's tokens after nodes that it has just run: the most likely token, and every other one
    with a confidence above `threshold`.

    Args:
      tips: `[T]` int32, the nodes.
      valid: int32 scalar, number of valid nodes.
      probabilities: `[T, V]` float32, the draft's probabilities after each.
      shifts: shifts of their calibration (see `calibrated`).
      branches: maximum number of children of a node.
      threshold: see above.
    """
    own, tokens = jax.lax.top_k(probabilities, branches)
    confidences = calibrated(own, jnp.asarray(shifts))
    real = jnp.arange(tips.shape[0], dtype=jnp.int32) < valid
    first = jnp.arange(branches, dtype=jnp.int32) == 0
    wanted = real[:, None] & (first | (confidences > np.float32(threshold)))
    # By falling confidence: if the tree is full, the least likely tokens are left out.
    paths = tree.confidences[tips][:, None] * confidences
    order = jnp.argsort(-jnp.where(wanted, paths, -1.0).reshape(-1), stable=True)
    parents = jnp.broadcast_to(tips[:, None], tokens.shape)
    new = parents, tokens.astype(jnp.int32), confidences, wanted, own
    flat = (each.reshape(-1)[order] for each in new)
    return add_nodes(tree, *flat)


@shaped(fed="bool M")
def best_confidence(tree: TokenTree, fed: jax.Array) -> jax.Array:
    """Tc, the highest cumulative confidence of a branch that can still grow: float32 scalar, 0 if none can;
    `fed` is `[M]` bool, as in `next_tips`."""
    return jnp.max(jnp.where(tree.used & ~fed, tree.confidences, 0.0))


@shaped(logits="float32 M V", B=1)
def choices(tree: TokenTree, logits: jax.Array, sampler: SamplerState) -> jax.Array:
    """The target's token after each node, `[M]` int32, or `NO_TOKEN` (see `sample`).

    Each is chosen as in plain decoding: by the same sampler, with the same random numbers, after the same
    tokens. So the answer is the target's, greedy or sampled, for any tree.

    Args:
      tree: the tree; the root's token is already counted in `sampler`.
      logits: `[M, V]` float32, the target's logits after each node.
      sampler: state of the sequence up to the root, batch 1.
    """

    def by_sampler(logits: jax.Array) -> jax.Array:
        def at_node(node: jax.Array) -> jax.Array:
            # Tokens of the answer after the node; the root is counted already. Without penalties counts are
            # not read.
            said = tree.ancestors[node].at[0].set(False).astype(jnp.int32)
            counts = sampler.counts.at[0, tree.tokens].add(said)
            state = dataclasses.replace(sampler, counts=counts, drawn=sampler.drawn + tree.depths[node])
            return sample(logits[node][None], state)[0][0]

        # A loop, not `vmap`: the sampler branches on a request's options, and `vmap` would compute all
        # branches. One node at a time, because a tree's rows of a large vocabulary are many bytes.
        return jax.lax.map(at_node, jnp.arange(tree.room, dtype=jnp.int32))

    plain = (sampler.temperature <= 0) & ~sampler.penalized
    return jax.lax.cond(plain, likeliest, by_sampler, logits)
