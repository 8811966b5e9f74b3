"""Finds the parts of a prompt that may be dropped to shorten it: only the user's free text.

The template and its markers, the task's instruction and everything else around the user's turn are kept.
Tasks are not parsed within the turn, and a question's options are not inspected, so that the same rule
applies to served messages and to the tiny LM's training questions. Kept are:

- labels at the beginning of a line (`Screen:`, `Answer:`, a speaker's name), list markers, and whole lines
  that begin with a letter as a marker (`A) ...`), which are options;
- the name at the beginning of a list item, up to its colon (`- get_weather: ...`); its description may be
  dropped;
- the question: a line labelled as a goal, a request and the like; in the first and in the last line with more
  than a label, the last sentence, if it ends with a question mark or if the text is to be continued.

So in reviews, news and messages all words may be dropped; in a screen (DroidTask) its elements and past
steps but not the goal; in a choice between functions (BFCL) their descriptions, and a request that is not a
question; in a multiple-choice question (ARC, OpenBookQA) everything before its last sentence; in a chat the
messages but not the speakers.
"""

import dataclasses
import datetime
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from jaxllm.elastic.compression import forced_tokens, words_of
from jaxllm.errors import ConfigError
from jaxllm.text.marked_text import PLACE, MarkedText
from jaxllm.text.prompts import Prompt, prompt_text
from jaxllm.text.tokenizer import ChatOptions, Tokenizer

_LINE = re.compile(r"[^\n]*\S[^\n]*")
_OPTION_LINE = re.compile(r"\s*\(?[A-Z][.):](?=\s|$)")
_MARKER = re.compile(r"\s*(?:[-*+•]|\(?\d{1,3}[.)])(?=\s)")
_LABEL = re.compile(r"\s*[^\W\d_]\w*:(?=\s|$)")
# Name of a list item, possibly of a function: `- maps.find_route: ...`.
_ITEM_NAME = re.compile(r"\s*[^\W\d_][\w.\-]*:(?=\s|$)")
_ASKING = frozenset({"goal", "task", "request", "query", "instruction"})
_ASKS = re.compile(r".*\?[\s\"'”’)\]]*", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*\s+(?=\S)")
_WORD_END = re.compile(r"\S*")


@dataclasses.dataclass(frozen=True, eq=False)
class PromptTokens:
    """A rendered and encoded prompt, and its droppable spans.

    Spans are computed at first use: most requests have time for the whole prompt and do not need them.

    Attributes:
      marked: the rendered prompt.
      ids: `[T]` int32.
      offsets: `[T, 2]` int64, see `words_of`.
      find_spans: computes `spans`.
    """

    marked: MarkedText
    ids: np.ndarray
    offsets: np.ndarray
    find_spans: Callable[[], np.ndarray]

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> "PromptTokens":
        """Token ids without their text; none may be dropped."""
        return cls(
            marked=MarkedText.of_template(""),
            ids=np.asarray(ids, np.int32),
            offsets=np.zeros((len(ids), 2), np.int64),
            find_spans=lambda: np.zeros((0, 2), np.int64),
        )

    @property
    def text(self) -> str:
        """The rendered prompt."""
        return self.marked.text

    @functools.cached_property
    def spans(self) -> np.ndarray:
        """`[n, 2]` int64, droppable spans of characters, ascending."""
        return self.find_spans()

    @property
    def boundaries(self) -> np.ndarray:
        """`[2 n]` int64, begins and ends of droppable spans: words end there even without white space (see
        `words_of`)."""
        return self.spans.reshape(-1)

    @functools.cached_property
    def words(self) -> np.ndarray:
        """`[T]` int64, see `words_of`."""
        return words_of(self.offsets, self.text, self.boundaries)

    @functools.cached_property
    def forced(self) -> np.ndarray:
        """`[T]` bool, tokens that must be kept."""
        return forced_tokens(self.offsets, self.spans)


def prompt_tokens(
    tokenizer: Tokenizer, prompt: Prompt, *, now: datetime.datetime | None = None
) -> PromptTokens:
    """Renders and encodes a prompt.

    Args:
      tokenizer: tokenizer of the model, with its chat template.

    Raises:
      ConfigError: the rendered prompt has no token.
      TemplateError: the model's template is broken.
    """
    text, special = prompt_text(tokenizer, prompt, now=now)
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=special)
    if not ids:
        raise ConfigError(f"a question without a token: {text.text!r:.200}")

    def spans() -> np.ndarray:
        blank = prompt_text(tokenizer, dataclasses.replace(prompt, user=PLACE), now=now)[0].text
        return _user_spans(text.text, blank, prompt.user, goes_on=prompt.form == "text")

    return PromptTokens(marked=text, ids=np.asarray(ids, np.int32), offsets=offsets, find_spans=spans)


def conversation_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    **options: Unpack[ChatOptions],
) -> PromptTokens:
    """Renders the messages of a chat and encodes them. Of the last message, if it is a user's text, words may
    be dropped; of those before it none.

    Args:
      tokenizer: the model's, with its chat template.
      messages: see `Tokenizer.chat_text`.

    Raises:
      ConfigError, TemplateError, ContextOverflow: see `Tokenizer.encode_chat`.
    """
    text = tokenizer.chat_text(messages, **options)
    ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=False)

    def spans() -> np.ndarray:
        last = messages[-1] if messages else {}
        user, around = _only_text(last.get("content"))
        if last.get("role") != "user" or user is None:
            return np.zeros((0, 2), np.int64)
        blank = tokenizer.chat_text([*messages[:-1], {**last, "content": around}], **options)
        return _user_spans(text.text, blank.text, user)

    return PromptTokens(marked=text, ids=np.asarray(ids, np.int32), offsets=offsets, find_spans=spans)


def free_spans(user: str, *, goes_on: bool = False) -> np.ndarray:
    """The droppable spans of a user's text (see the module's docstring).

    Args:
      goes_on: whether the text is to be continued, so that its last sentence is kept.

    Returns:
      `[n, 2]` int64, characters, ascending; each span has more than white space.
    """
    free = np.ones(len(user), bool)

    def keep(first: int, last: int) -> None:
        """Keeps characters, and the rest of the word in which they end."""
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
    edges = np.flatnonzero(np.diff(np.concatenate([[False], free, [False]]).astype(np.int8)))
    spans = [span for span in edges.reshape(-1, 2) if user[span[0] : span[1]].strip()]
    return np.array(spans, np.int64).reshape(-1, 2)


def _user_spans(text: str, blank: str, user: str, *, goes_on: bool = False) -> np.ndarray:
    """The droppable spans of a rendered prompt, which has the user's text where `blank` has `PLACE`; none if
    the template does not write that text exactly once and unchanged."""
    before, *behind = blank.split(PLACE)
    around = len(before) + sum(map(len, behind))
    # The user's text unchanged, or without the white space around it, which some templates trim.
    whole = len(behind) == 1 and text.startswith(before) and text.endswith(behind[0])
    inner = text[len(before) : len(text) - len(behind[0])] if whole and around <= len(text) else ""
    if inner.strip() != user.strip():
        return np.zeros((0, 2), np.int64)
    return len(before) + free_spans(inner, goes_on=goes_on)


def _only_text(content: Any) -> tuple[str | None, Any]:
    """The text of a message's content, None if that is not a single text, and the content with `PLACE`
    instead of it."""
    if isinstance(content, str):
        return content, PLACE
    texts = [each for each in content or () if isinstance(each, Mapping) and each.get("type") == "text"]
    if len(texts) != 1:
        return None, content
    return texts[0]["text"], [{**each, "text": PLACE} if each is texts[0] else each for each in content]


def _head(line: str) -> int:
    """Number of characters of the marker or label at the beginning of a line, including an item's name."""
    marker = _MARKER.match(line)
    if marker is None:
        label = _LABEL.match(line)
        return label.end() if label else 0
    name = _ITEM_NAME.match(line, marker.end())
    return (name or marker).end()
