"""What of a prompt may go when it is made shorter: nothing but the user's free text.

The template and its markers, the task's instruction and everything else around the user's turn stay. Within
the turn there is no parsing of tasks, and a question's options are not looked at, so that a served message is
read by the same rule as a question that the tiny LM was trained on. There stay:

- labels at the beginning of a line (`Screen:`, `Answer:`, a speaker's name), markers of lists, and the whole
  of a line that a letter marks (`A) ...`): it is an option;
- the name that an item of a list begins with, up to its colon (`- get_weather: ...`); what explains it may
  go;
- what asks: a line labelled as a goal, a request and the like; in the first and in the last line that say
  more than a label, the last sentence, if it ends with a question mark or if the text is to be gone on from.

So of reviews, news and messages all words may go, of a screen (DroidTask) those of its elements and of what
was done but not the goal, of a choice between functions (BFCL) those of their descriptions and of a request
that is no question, of a multiple-choice question (ARC, OpenBookQA) those before its last sentence, of a chat
what was said but not who said it.
"""

import dataclasses
import datetime
import functools
import re
from collections.abc import Callable

import numpy as np

from jaxllm.elastic.compression import forced_tokens, words_of
from jaxllm.errors import ConfigError
from jaxllm.marked_text import MarkedText
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.prompts import prompt_text
from jaxllm.tokenizer import Tokenizer

_LINE = re.compile(r"[^\n]*\S[^\n]*")
_OPTION_LINE = re.compile(r"\s*\(?[A-Z][.):](?=\s|$)")
_MARKER = re.compile(r"\s*(?:[-*+•]|\(?\d{1,3}[.)])(?=\s)")
_LABEL = re.compile(r"\s*[^\W\d_]\w*:(?=\s|$)")
# What an item of a list is called, which may be the name of a function: `- maps.find_route: ...`.
_ITEM_NAME = re.compile(r"\s*[^\W\d_][\w.\-]*:(?=\s|$)")
_ASKING = frozenset({"goal", "task", "request", "query", "instruction"})
_ASKS = re.compile(r".*\?[\s\"'”’)\]]*", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+(?=\S)")
_WORD_END = re.compile(r"\S*")
# Stands for the user's text while a template is looked at; no text has it.
_PLACE = "\ue000\ue001\ue000"


@dataclasses.dataclass(frozen=True, eq=False)
class PromptTokens:
    """A question as a model reads it, and what of it may go, which is looked up when it is first asked for:
    most requests leave time for the whole prompt, and should not wait for it.

    Attributes:
      marked: the rendered prompt.
      ids: `[T]` int32.
      offsets: `[T, 2]` int64, see `words_of`.
      find_spans: gives `spans`.
    """

    marked: MarkedText
    ids: np.ndarray
    offsets: np.ndarray
    find_spans: Callable[[], np.ndarray]

    @property
    def text(self) -> str:
        """The rendered prompt."""
        return self.marked.text

    @functools.cached_property
    def spans(self) -> np.ndarray:
        """`[n, 2]` int64, the characters that may go, ascending."""
        return self.find_spans()

    @property
    def boundaries(self) -> np.ndarray:
        """`[2 n]` int64, where words end even without white space (see `words_of`): where something that may
        go begins or ends."""
        return self.spans.reshape(-1)

    @functools.cached_property
    def words(self) -> np.ndarray:
        """`[T]` int64, see `words_of`."""
        return words_of(self.offsets, self.text, self.boundaries)

    @functools.cached_property
    def forced(self) -> np.ndarray:
        """`[T]` bool, what must stay."""
        return forced_tokens(self.offsets, self.spans)


def prompt_tokens(
    tokenizer: Tokenizer,
    example: TaskExample,
    *,
    now: datetime.datetime | None = None,
) -> PromptTokens:
    """Renders a question and encodes it.

    Args:
      tokenizer: the model's, whose template writes the text.
      example: the question.
      now: told to templates that ask for the time.

    Raises:
      ConfigError: the question has no text that the tokenizer makes a token of.
      TemplateError: the model's template is broken.
    """
    text, special = prompt_text(tokenizer, example, now=now)
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=special)
    if not ids:
        raise ConfigError(f"a question without a token: {text.text!r:.200}")
    return PromptTokens(
        marked=text,
        ids=np.asarray(ids, np.int32),
        offsets=offsets,
        find_spans=lambda: droppable_spans(tokenizer, example, text.text, now=now),
    )


def droppable_spans(
    tokenizer: Tokenizer, example: TaskExample, text: str, *, now: datetime.datetime | None = None
) -> np.ndarray:
    """The characters of a question's prompt that may go.

    Args:
      tokenizer: the model's, whose template wrote `text`.
      example: the question.
      text: what `prompt_text` made of it.
      now: told to the template, the same as for `text`.

    Returns:
      `[n, 2]` int64, ascending; empty where the template does not have the user's text once and as it is.

    Raises:
      TemplateError: the model's template is broken.
    """
    blank = dataclasses.replace(example, user=_PLACE)
    before, *behind = prompt_text(tokenizer, blank, now=now)[0].text.split(_PLACE)
    around = len(before) + sum(map(len, behind))
    # As it is, or without the white space around it, which templates trim.
    whole = len(behind) == 1 and text.startswith(before) and text.endswith(behind[0])
    inner = text[len(before) : len(text) - len(behind[0])] if whole and around <= len(text) else ""
    if inner.strip() != example.user.strip():
        return np.zeros((0, 2), np.int64)
    return len(before) + free_spans(inner, goes_on=example.form == "text")


def free_spans(user: str, *, goes_on: bool = False) -> np.ndarray:
    """The characters of a user's text that may go (see the module's docstring).

    Args:
      user: the text.
      goes_on: whether the text is one to go on from, so that its last sentence asks.

    Returns:
      `[n, 2]` int64, ascending, each with something else than white space.
    """
    free = np.ones(len(user), bool)

    def keep(first: int, last: int) -> None:
        """Keeps characters, and the rest of the word that they end in."""
        found = _WORD_END.match(user, last)
        free[first : last if found is None else found.end()] = False

    says: list[tuple[int, int]] = []
    for line in _LINE.finditer(user):
        first, last = line.span()
        if _OPTION_LINE.match(line[0]):
            keep(first, last)
            continue
        head = _head(line[0])
        if head:
            keep(first, first + head)
        label = line[0][:head].strip().rstrip(":").lower()
        if label in _ASKING:
            keep(first, last)
        elif line[0][head:].strip():
            says.append((first + head, last))
    for place in {0, len(says) - 1} if says else ():
        first, last = says[place]
        if _ASKS.fullmatch(user, first, last) or (goes_on and place == len(says) - 1):
            ended = [found.end() for found in _SENTENCE_END.finditer(user, first, last)]
            keep(max(ended, default=first), last)
    return _runs(free, user)


def _head(line: str) -> int:
    """How long the marker or label is that a line begins with, an item's name behind its marker included."""
    marker = _MARKER.match(line)
    if marker is None:
        label = _LABEL.match(line)
        return label.end() if label else 0
    name = _ITEM_NAME.match(line, marker.end())
    return (name or marker).end()


def _runs(free: np.ndarray, user: str) -> np.ndarray:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
    spans = edges.reshape(-1, 2)
    return np.array([span for span in spans if user[span[0] : span[1]].strip()], np.int64).reshape(-1, 2)
