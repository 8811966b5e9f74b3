"""Packs questions into rows for scoring: each question once, followed by all of its possible answers.

A `Branching` becomes a trunk and branches (see `jaxllm.nn.documents`); a row has several of them one after
another, and a dispatch has several rows. The prediction after each token is scored, so an answer's last token
is not an input.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxllm.steps.model import SCORE_BLOCK, ScoredTokens

# In short rows attention computes few masked pairs; in long rows less padding remains.
_ROW_TOKENS = (128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Branching:
    """A text and its possible ends, as token ids.

    Attributes:
      trunk: the common beginning, at least one token.
      branches: the continuations, each at least one token.
    """

    trunk: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]

    @property
    def longest_tokens(self) -> int:
        """Number of input tokens of the trunk with its longest branch."""
        return len(self.trunk) + max(map(len, self.branches)) - 1

    @property
    def fed_tokens(self) -> int:
        """Number of input tokens of the trunk with all branches."""
        return len(self.trunk) + sum(map(len, self.branches)) - len(self.branches)


@dataclasses.dataclass(frozen=True, eq=False)
class BranchScores:
    """The scores of a question's branches.

    Attributes:
      sums: `[branches]` float64, natural log-probability of each, summed over its tokens.
      greedy: `[branches]` bool, whether each of its tokens is the likeliest after those before it.
    """

    sums: np.ndarray
    greedy: np.ndarray


@dataclasses.dataclass(frozen=True)
class Piece:
    """A question, with as many of its branches as fit into a row.

    Attributes:
      trunk: see `Branching`.
      branches: each with the index of its answer among all answers of all questions.
    """

    trunk: tuple[int, ...]
    branches: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def fed_tokens(self) -> int:
        """Number of input tokens."""
        return len(self.trunk) + sum(len(branch) - 1 for _, branch in self.branches)

    @property
    def targets(self) -> int:
        """Number of scored tokens."""
        return sum(len(branch) for _, branch in self.branches)


@dataclasses.dataclass
class Packed:
    """The arguments of one dispatch of `steps.score_branches`, and the answers that it scores.

    Attributes:
      tokens, starts, trunk_ends, branch_starts: `[B, T]` int32 (see `jaxllm.nn.documents`).
      places, targets: `[P]` int32 (see `steps.score_branches`), with `count` valid ones.
      owners: `[P]` int32, index of the answer of each target.
      used: number of valid tokens in each row.
      count: number of real targets.
    """

    tokens: np.ndarray
    starts: np.ndarray
    trunk_ends: np.ndarray
    branch_starts: np.ndarray
    places: np.ndarray
    targets: np.ndarray
    owners: np.ndarray
    used: list[int]
    count: int = 0

    @classmethod
    def empty(cls, rows: int, length: int) -> "Packed":
        """A dispatch of padding: each token is a document of its own."""
        alone = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
        room = target_room(rows, length)
        return cls(
            tokens=np.zeros((rows, length), np.int32),
            starts=alone.copy(),
            trunk_ends=alone + np.int32(1),
            branch_starts=alone + np.int32(1),
            places=np.zeros(room, np.int32),
            targets=np.zeros(room, np.int32),
            owners=np.zeros(room, np.int32),
            used=[0] * rows,
        )

    @property
    def scored(self) -> ScoredTokens:
        """The tokens that the step scores."""
        return ScoredTokens(self.places, self.targets, np.int32(self.count))

    def take(self, piece: Piece) -> bool:
        """Puts a piece into the first row with room for it; returns whether there was one."""
        length = self.tokens.shape[1]
        if self.count + piece.targets > len(self.targets):
            return False
        rooms = (row for row, used in enumerate(self.used) if used + piece.fed_tokens <= length)
        row = next(rooms, None)
        if row is None:
            return False
        start = self.used[row]
        trunk_end = start + len(piece.trunk)
        end = start + piece.fed_tokens
        self.tokens[row, start:trunk_end] = piece.trunk
        self.starts[row, start:end] = start
        self.trunk_ends[row, start:end] = trunk_end
        self.branch_starts[row, start:trunk_end] = trunk_end
        at, base = trunk_end, row * length
        for owner, branch in piece.branches:
            fed = len(branch) - 1
            self.tokens[row, at : at + fed] = branch[:-1]
            self.branch_starts[row, at : at + fed] = at
            scored = slice(self.count, self.count + len(branch))
            # A branch's first token follows the trunk's last, the others each other.
            self.places[scored] = [base + trunk_end - 1, *range(base + at, base + at + fed)]
            self.targets[scored] = branch
            self.owners[scored] = owner
            self.count += len(branch)
            at += fed
        self.used[row] = end
        return True


def target_room(rows: int, length: int) -> int:
    """The capacity of a dispatch for targets (P): one per token, in whole blocks."""
    return -(-rows * length // SCORE_BLOCK) * SCORE_BLOCK


def row_lengths(context_tokens: int) -> tuple[int, ...]:
    """The row lengths that buckets exist for, ascending; the last is the context."""
    return (*(length for length in _ROW_TOKENS if length < context_tokens), context_tokens)


def cut(questions: Sequence[Branching], lengths: Sequence[int]) -> dict[int, list[Piece]]:
    """Cuts questions into pieces: length of their rows -> pieces, the largest first.

    Args:
      questions: no trunk with a branch is longer than the longest row.
    """
    pieces: dict[int, list[Piece]] = {length: [] for length in lengths}
    answers = 0
    for question in questions:
        branches = list(enumerate(question.branches, answers))
        answers += len(branches)
        for piece in _split(question.trunk, branches, lengths[-1]):
            pieces[next(length for length in lengths if length >= piece.fed_tokens)].append(piece)
    for group in pieces.values():
        group.sort(key=lambda piece: -piece.fed_tokens)
    return {length: group for length, group in pieces.items() if group}


def pack(pieces: Sequence[Piece], rows: int, length: int) -> Iterator[Packed]:
    """Packs pieces into dispatches of `rows` rows of `length` tokens."""
    packed = Packed.empty(rows, length)
    for piece in pieces:
        if packed.take(piece):
            continue
        yield packed
        packed = Packed.empty(rows, length)
        taken = packed.take(piece)
        assert taken
    if packed.count:
        yield packed


# Computes the log-probabilities of a dispatch's real targets, and whether each is the likeliest, `[count]`.
Dispatch = Callable[[Packed], tuple[np.ndarray, np.ndarray]]


def score_pieces(
    questions: Sequence[Branching],
    pieces: Mapping[int, Sequence[Piece]],
    rows: Mapping[int, int],
    dispatch: Dispatch,
    on_scored: Callable[[int, int], None] | None = None,
) -> list[BranchScores]:
    """Scores each branch of each question.

    Args:
      questions: any number, in any order.
      pieces: result of `cut`.
      rows: length of a row -> number of rows per dispatch.
      dispatch: see `Dispatch`.
      on_scored: callback for (scored tokens, all tokens) after each dispatch.
    """
    counts = [len(question.branches) for question in questions]
    sums, greedy = np.zeros(sum(counts)), np.ones(sum(counts), bool)
    done, total = 0, sum(len(branch) for question in questions for branch in question.branches)
    for length, group in pieces.items():
        for packed in pack(group, rows[length], length):
            owners = packed.owners[: packed.count]
            scores, likeliest = dispatch(packed)
            np.add.at(sums, owners, scores.astype(np.float64))
            np.logical_and.at(greedy, owners, likeliest)
            done += packed.count
            if on_scored is not None:
                on_scored(done, total)
    cuts = np.cumsum(counts)[:-1]
    return list(map(BranchScores, np.split(sums, cuts), np.split(greedy, cuts))) if counts else []


def _split(
    trunk: tuple[int, ...], branches: Sequence[tuple[int, tuple[int, ...]]], longest: int
) -> Iterator[Piece]:
    """Cuts a question into pieces of at most `longest` input tokens, each with the whole trunk."""
    group: list[tuple[int, tuple[int, ...]]] = []
    fed = targets = 0
    for owner, branch in branches:
        more = len(branch) - 1
        if group and (len(trunk) + fed + more > longest or targets + len(branch) > longest):
            yield Piece(trunk, tuple(group))
            group, fed, targets = [], 0, 0
        group.append((owner, branch))
        fed, targets = fed + more, targets + len(branch)
    yield Piece(trunk, tuple(group))
