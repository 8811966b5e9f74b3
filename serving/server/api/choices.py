"""One answer of a request while it comes: its reasoning, text and calls, in order, and what is new."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.server.calls import Ended, Event, Piece, Started
from jaxllm.serving.server.job import Job
from jaxllm.serving.server.limits import written
from jaxllm.text.answer_parts import AnswerScanner, CallArguments, CallBegins, CallEnds, Part, Text, Thinking

# Makes a scanner for each answer; None if answers are only text.
MakeScanner = Callable[[], AnswerScanner] | None


@dataclasses.dataclass(kw_only=True)
class AnswerPart:
    """A part of an answer so far: neighbouring pieces of reasoning or of text, or a call.

    Attributes:
      kind: what it is.
      pieces: pieces of its text; a call's arguments, in JSON.
      name, id: of a call: its tool, and its id, unique in its conversation.
      whole: whether a call has ended; in an ended answer, False says that the answer was cut inside of it.
    """

    kind: Literal["reasoning", "text", "call"]
    pieces: list[str] = dataclasses.field(default_factory=list)
    name: str = ""
    id: str = ""
    whole: bool = False

    @property
    def text(self) -> str:
        """The text, or a call's arguments."""
        return "".join(self.pieces)


class Choice:
    """One of a request's answers so far.

    Attributes:
      index: its index.
      job: the accepted call.
      started, ended: events; None until then.
      parts: reasoning, text and calls in order, neighbours joined.
      calls: the calls among them.
      logprobs: log-probabilities of all tokens outside of the reasoning, if requested.
      characters: number of characters of these tokens' text so far, with calls.
      tokens: ids of all its tokens so far.
      reasoning_tokens: number of tokens of the reasoning, with its markers.
      unmet: what the answer breaks of the schemas that were asked for; empty for nothing.
      new: parts of the last event.
      new_logprobs: log-probabilities of tokens that the last event decided to be outside of the reasoning.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        scanner: AnswerScanner | None,
        *,
        thinks: bool = False,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes an empty choice; `thinks`: whether the answer may have reasoning; `notes`: for `facts`."""
        self.index, self.job, self._scanner, self._thinks = index, job, scanner, thinks
        self._notes = notes or {}
        self.started: Started | None = None
        self.ended: Ended | None = None
        self.parts: list[AnswerPart] = []
        self.calls: list[AnswerPart] = []
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.characters = self.reasoning_tokens = 0
        self.unmet = ""
        # Times of the first piece and the last.
        self._times_s: tuple[float, float] | None = None
        self.new: Sequence[Part] = ()
        self.new_logprobs: Sequence[TokenLogprob] = ()
        # Tokens whose part is not known yet, as characters and log-probabilities, and the last known part.
        self._undecided: list[tuple[int, TokenLogprob | None]] = []
        self._in_thought = self._seen = False

    @property
    def text(self) -> str:
        """The text without reasoning and calls."""
        return "".join(each.text for each in self.parts if each.kind == "text")

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(each.text for each in self.parts if each.kind == "reasoning")

    @property
    def whole_calls(self) -> list[AnswerPart]:
        """The calls that have ended."""
        return [each for each in self.calls if each.whole]

    @property
    def new_text(self) -> str:
        """Text of the last event."""
        return "".join(each.text for each in self.new if isinstance(each, Text))

    @property
    def new_reasoning(self) -> str:
        """Reasoning of the last event."""
        return "".join(each.text for each in self.new if isinstance(each, Thinking))

    @property
    def finish_reason(self) -> str:
        """Why the answer ended, as in OpenAI's format: "stop", "length" or "tool_calls". The last one means
        that all calls are complete: an answer that was cut never has it."""
        end = self.ended
        assert end is not None
        cut = end.finish_reason == "length" or end.stop_string is not None
        whole = not cut and all(each.whole for each in self.calls)
        return "tool_calls" if self.calls and whole else end.finish_reason

    def take(self, event: Event) -> None:
        """Adds an event."""
        news: list[Part] = []
        known: list[TokenLogprob] = []
        match event:
            case Started():
                self.started = event
            case Piece():
                self.tokens += event.tokens
                for text, tokens, logprobs in self._slices(event):
                    parts = (Text(text),) * bool(text) if self._scanner is None else self._scanner.feed(text)
                    self._undecided += zip((len(text), *[0] * (tokens - 1)), logprobs, strict=True)
                    known += self._decided(parts)
                    news += parts
                if not self._seen and any(not isinstance(each, Thinking) for each in news):
                    self._seen = True
                    self.job.saw_answer(event.at_s)
                first_s, _ = self._times_s or (event.at_s, 0.0)
                self._times_s = first_s, event.at_s
            case Ended():
                self.ended = event
                cut = event.finish_reason == "length" or event.stop_string is not None
                news += () if self._scanner is None else self._scanner.finish(cut=cut)
                known += self._decided(news, last=True)
        self.new, self.new_logprobs = news, known
        self.logprobs += known
        for part in news:
            self._add(part)

    def _slices(self, piece: Piece) -> Iterator[tuple[str, int, Sequence[TokenLogprob | None]]]:
        """A piece's text, number of tokens and their log-probabilities: token by token where reasoning is
        counted, else all at once."""
        count = len(piece.tokens)
        logprobs: Sequence[TokenLogprob | None] = piece.logprobs or [None] * count
        if not self._thinks or not count:
            yield piece.text, max(count, 1), logprobs or [None]
            return
        # The text of a token may come later than it: an event has what is shown, at most the whole text.
        ends = [*piece.ends[: count - 1], *[len(piece.text)] * (count - len(piece.ends[: count - 1]))]
        for index, end in enumerate(ends):
            yield piece.text[ends[index - 1] if index else 0 : end], 1, logprobs[index : index + 1]

    def _decided(self, parts: Sequence[Part], *, last: bool = False) -> list[TokenLogprob]:
        """Counts the tokens that these parts decide, as reasoning or as others; returns the log-probabilities
        of the others. Markers, and what is between them, are the reasoning's."""
        if not self._thinks:
            undecided, self._undecided = self._undecided, []
        elif not parts and not last:
            return []
        else:
            newest = (
                self._undecided[-1:] if parts and not isinstance(parts[-1], Thinking) and not last else []
            )
            older = self._undecided[: len(self._undecided) - len(newest)]
            if self._in_thought or (parts and isinstance(parts[0], Thinking)):
                self.reasoning_tokens += len(older)
                older = []
            undecided, self._undecided = older + newest, []
            self._in_thought = isinstance(parts[-1], Thinking) if parts else self._in_thought
        self.characters += sum(characters for characters, _ in undecided)
        return [logprob for _, logprob in undecided if logprob is not None]

    def _add(self, part: Part) -> None:
        match part:
            case CallBegins():
                self.calls.append(AnswerPart(kind="call", name=part.name, id=part.id))
                self.parts.append(self.calls[-1])
            case CallArguments():
                self.calls[part.index].pieces.append(part.text)
            case CallEnds():
                self.calls[part.index].whole = True
            case _:
                kind = "reasoning" if isinstance(part, Thinking) else "text"
                if not self.parts or self.parts[-1].kind != kind:
                    self.parts.append(AnswerPart(kind=kind))
                self.parts[-1].pieces.append(part.text)

    def timings(self) -> dict[str, float]:
        """Numbers of tokens and times so far, as llama.cpp's server reports them; empty before any."""
        start, times_s = self.started, self._times_s
        if start is None or times_s is None:
            return {}
        found: dict[str, float] = {"cache_n": start.reused_tokens}
        for name, count, took_s in (
            ("prompt", start.prompt_tokens - start.reused_tokens, times_s[0] - self.job.arrived_s),
            ("predicted", len(self.tokens), times_s[1] - times_s[0]),
        ):
            found |= {f"{name}_n": count, f"{name}_ms": 1000 * took_s}
            found[f"{name}_per_token_ms"] = 1000 * took_s / max(count, 1)
            found[f"{name}_per_second"] = count / took_s if took_s > 0 else 0.0
        return found

    def facts(self) -> dict[str, Any]:
        """The `jaxllm` object: plan and cost."""
        start, end = self.started, self.ended
        facts: dict[str, Any] = dict(self._notes)
        if start is not None:
            facts |= {name: getattr(start, name) for name in _STARTED}
            facts |= {name: getattr(start, name) for name in ("adapter", "shared") if getattr(start, name)}
            facts |= {"moved": list(start.moved)} if start.moved else {}
            if start.objective is not None:
                facts |= {"slo": written(start.objective), "slo_from": "app" if start.bound else "call"}
        if end is not None:
            facts |= {name: getattr(end, name) for name in _ENDED}
            facts |= {} if end.answer_ttft_ms is None else {"answer_ttft_ms": end.answer_ttft_ms}
            facts |= {"context": end.context, "context_tokens": end.context_tokens} if end.context else {}
            facts |= {"unmet": self.unmet} if self.unmet else {}
        return facts


_STARTED = ("source", "level", "prompt_tokens", "kept_tokens", "reused_tokens", "queued_ms")
_ENDED = (
    "ttft_ms", "tpot_ms", "engine_ttft_ms", "engine_tpot_ms", "met", "drafted", "seed",
    "stop_string",
)  # fmt: skip
