"""Keeps apps' contexts for the engine's thread: prepares and begins turns in them, creates, forks, pins and
deletes them.

An app's context is looked up by the app and its name together, so that another app's name is as unknown as
one that never was.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError, ContextGone, JaxllmError
from jaxllm.kv.codecs import RAW, STATE
from jaxllm.text.droppable import PromptTokens
from serving.contexts.answer import ContextCall
from serving.contexts.forking import fork
from serving.contexts.manager import Contexts
from serving.contexts.record import Record
from serving.contexts.turn_ids import TurnTokens, conversation_turn_ids, turn_ids
from serving.images.prompt import with_images
from serving.planning.objectives import Cost, EnergyBudget
from serving.planning.planner import Load
from serving.planning.profile import DeviceProfile
from serving.planning.safety_margin import SafetyMargin
from serving.planning.turns import level_of_turn
from serving.prompt_rows import PromptRows
from serving.request import Request
from serving.run import Run
from serving.server.adapters import Adapters
from serving.server.calls import Call, Conversation
from serving.server.facts import ContextFacts
from serving.server.figures import ContextsFigures
from serving.server.limits import AppLimits, require_context, require_pin, require_stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextTurn:
    """A call's turn in a context.

    Attributes:
      record: of the context that the call names.
      before: number of its tokens that the turn follows.
      asked: these tokens and the turn's.
      computed_tokens: tokens of the prompt that are in no stored chunk of the context's level.
      whole: expected cost of the whole model, if it had the context's chunks; ratios are relative to it.
      costs: expected costs by level; at others than the context's all tokens are computed.
      most_tokens: of the context when the answer has ended.
      most_bytes: that chunks of the context will take in memory; at least 1.
      adapter: that the context was made with, by name; empty for none.
      forks: whether it is answered in a new context, with the tokens that the turn follows.
      rows: that stand in place of tokens of the prompt; None for none.
    """

    record: Record
    before: int
    asked: TurnTokens
    computed_tokens: int
    whole: Cost
    costs: Mapping[int, Cost]
    most_tokens: int
    most_bytes: int
    adapter: str = ""
    forks: bool = False
    rows: PromptRows | None = None


class ContextTurns:
    """The contexts of a service. All is for the engine's thread, but for what says otherwise.

    Args:
      contexts: of all apps.
      profile: of this device.
      limits_of: an app's limits now.
      margin: how much later than the profile says answers come; None where that is not known.
      adapters: of the service; None for none.
    """

    def __init__(
        self,
        contexts: Contexts,
        profile: DeviceProfile,
        limits_of: Callable[[str], AppLimits] = lambda app: AppLimits(),
        *,
        margin: SafetyMargin | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._margin, self._adapters = margin, adapters or Adapters(contexts.engine.model)
        self._contexts, self._profile, self._limits_of = contexts, profile, limits_of
        # For other threads, which must not ask the store.
        self._known = {(each.app, each.name): each for each in contexts.store.records()}
        self._damaged = frozenset((each.app, each.name) for each in contexts.store.damage())
        self._pinned_bytes = 0
        self._count_pinned()

    @property
    def room_bytes(self) -> int:
        """For chunks of contexts that run: what pinned ones leave. From any thread."""
        return max(0, self._contexts.memory.budget_bytes - self._pinned_bytes)

    def use_profile(self, profile: DeviceProfile) -> None:
        """Expects times by another profile of this device from here on."""
        self._profile = profile

    def require(self, app: str, name: str) -> None:
        """Checks that an app has a context. From any thread.

        Raises:
          ContextGone: it has not.
        """
        if (app, name) not in self._known and (app, name) not in self._damaged:
            raise _gone(name)

    def figures(self) -> dict[str, ContextsFigures]:
        """Contexts by app, and their chunks in memory by width. From any thread."""
        told: dict[str, ContextsFigures] = {}
        chunks: dict[str, Counter[str]] = {}
        for record in list(self._known.values()):
            own = told.setdefault(
                record.app, ContextsFigures(contexts=0, pinned=0, stored_bytes=0, chunks={})
            )
            own["contexts"] = own.get("contexts", 0) + 1
            own["pinned"] = own.get("pinned", 0) + record.pinned
            own["stored_bytes"] = own.get("stored_bytes", 0) + _stored_bytes(record)
            chunks.setdefault(record.app, Counter()).update(
                "raw" if each.bits in (RAW, STATE) else str(each.bits)
                for each in self._contexts.memory.chunks(record.name).values()
            )
        for app, own in told.items():
            own["chunks"] = dict(chunks[app])
        return told

    # -- calls ------------------------------------------------------------------------------------

    def turn(self, call: Call, *, free: bool = True) -> ContextTurn:
        """Encodes a call's turn in its context.

        Args:
          call: to take.
          free: whether no other call continues the context.

        Raises:
          ContextGone: the app has no context of this name, or its tokens are of another tokenizer, or its
            adapter is not loaded and the call names none.
          ConfigError: the call names another adapter, the prompt is no turn (see `conversation_turn_ids`),
            the context has fewer tokens than the call names, or the objective limits energy.
          ContextOverflow: context and turn are longer than the window.
          BudgetExceeded: the app's contexts take all that they may; or see `PendingErrors`.
          CheckpointError: the context cannot be read; or see `PendingErrors`.
        """
        contexts, engine = self._contexts, self._contexts.engine
        if isinstance(call.objective, EnergyBudget):
            raise ConfigError(
                "no budget of energy is planned in a context, whose chunks took some before; ask for a time"
            )
        record, adapter = self._own(call.app, call.context, call.adapter)
        limits = self._limits_of(call.app)
        if limits.stored_bytes:
            require_stored(limits, self.listed(call.app))
        before, forks = record.tokens, False
        if call.context_tokens is not None:
            if not 0 <= call.context_tokens <= len(before):
                raise ConfigError(
                    f"the context {record.name} has {len(before)} tokens, and the call continues the first "
                    f"{call.context_tokens}; continue a later response, or begin a new context"
                )
            before = before[: call.context_tokens]
            forks = not free or len(before) < len(record.tokens)
        if not forks:
            contexts.ready(record.name)
        config, level = call.config, record.origin.level
        new, rows = self._turn_ids(call, before)
        asked = TurnTokens.after(record, before, new, engine.tokenizer, engine.cfg)
        rows = PromptRows.joined((0, contexts.rows_before(record, len(before))), (len(before), rows))
        request = engine.request(asked.prompt, config, level=level, rows=rows, source=asked.source)
        request.require_served_by(engine.runner_at(level))
        if rows is not None:
            # With ids of rows in their places.
            asked = dataclasses.replace(asked, prompt=request.prompt)
        # A source is read again, unless its context ran last.
        prompt = asked.told
        computed = _computed(record, len(before), len(prompt))

        def cost(level: int, tokens: int) -> Cost:
            return Cost(
                ttft_ms=self._profile.ttft(level, tokens),
                tpot_ms=self._profile.tpot(level, len(prompt)),
                tokens=config.max_tokens,
            )

        costs = {level: cost(level, computed)}
        if call.objective is not None:
            costs |= {each: cost(each, len(prompt)) for each in engine.levels if each != level}
        most = len(request.prompt) + config.max_tokens
        return ContextTurn(
            record=record,
            before=len(before),
            asked=asked,
            computed_tokens=computed,
            whole=cost(WHOLE, computed),
            costs=costs,
            most_tokens=most,
            most_bytes=max(1, *(contexts.chunk_bytes(record, most, each) for each in costs)),
            adapter=adapter,
            forks=forks,
            rows=rows,
        )

    def begin(self, turn: ContextTurn, call: Call, load: Load) -> tuple[Request, ContextCall]:
        """The request of a turn, and what restores its context and stores it. A call with an objective is
        answered by the largest level that is in time; others by the context's.

        Raises:
          ObjectiveMissed: no level is in time, and the call insists.
        """
        level = turn.record.origin.level
        if call.objective is not None:
            level = level_of_turn(
                turn.costs,
                call.objective,
                turn.whole,
                margin=self._margin,
                load=load,
                strict=bool(call.strict),
            )
        request = self._contexts.engine.request(
            turn.asked.prompt, call.config, level=level, rows=turn.rows, source=turn.asked.source
        )
        return request, _TurnCall(self, turn, most_tokens=turn.most_tokens)

    def ended(self, app: str, name: str) -> None:
        """Takes notice of a context that has changed, or is gone."""
        try:
            self._known[app, name] = self._contexts.store.record(name, app)
        except JaxllmError:
            self._known.pop((app, name), None)
        self._count_pinned()

    def forked(self, turn: ContextTurn) -> Record:
        """A new context with those tokens that a turn follows.

        Raises:
          BudgetExceeded, CheckpointError: see `fork`.
        """
        app = turn.record.app
        require_context(self._limits_of(app), self.listed(app))
        return fork(self._contexts, turn.record, turn.before)

    def dropped(self, record: Record) -> None:
        """Deletes a forked context that nobody will know of."""
        with contextlib.suppress(JaxllmError):
            self._contexts.delete(record.name)
        self._contexts.pending_errors.forget(record.name)

    def _own(self, app: str, name: str, asked: str = "") -> tuple[Record, str]:
        """An app's context and its adapter, which is put on the model."""
        digest = self._contexts.store.record(name, app).origin.adapter
        adapter = self._adapters.of_context(digest, name, asked)
        self._adapters.use(adapter)
        return self._contexts.record(app, name), adapter

    def _count_pinned(self) -> None:
        pinned = [each for each in self._known.values() if each.pinned]
        self._pinned_bytes = sum(map(self._contexts.chunk_bytes, pinned))

    def _turn_ids(self, call: Call, before: Sequence[int]) -> tuple[Sequence[int], PromptRows | None]:
        """The tokens that a call adds, and the rows that stand in place of some."""
        engine, prompt, now = self._contexts.engine, call.prompt, datetime.now()
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        if isinstance(prompt, Conversation):
            ids = conversation_turn_ids(tokenizer, before, prompt.messages, tools=prompt.tools, now=now)
            if not prompt.images:
                return ids, None
            whole, rows = with_images(tokenizer, PromptTokens.of_ids(ids), prompt.images)
            return whole.ids.tolist(), rows
        if isinstance(prompt, str):
            return turn_ids(tokenizer, before, prompt, now=now), None
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one token")
        return prompt, None

    # -- contexts ---------------------------------------------------------------------------------

    def create(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> ContextFacts:
        """See `Backend.create_context`."""
        limits, there = self._limits_of(app), self.listed(app)
        require_context(limits, there)
        if pinned:
            require_pin(limits, there, "")
        self._adapters.use(adapter)
        record = self._contexts.create(app, level=level, pinned=pinned)
        self._known[app, record.name] = record
        return self._facts(record)

    def listed(self, app: str) -> list[ContextFacts]:
        """All contexts of an app, also those of other models and levels."""
        return [self._facts(each) for each in self._contexts.store.records(app)]

    def pin(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """See `Backend.pin_context`."""
        self._own(app, name)
        if pinned:
            require_pin(self._limits_of(app), self.listed(app), name)
        record = self._contexts.pin(name, pinned)
        self._known[app, name] = record
        self._count_pinned()
        return self._facts(record)

    def delete(self, app: str, name: str) -> None:
        """See `Backend.delete_context`; it must not be answering."""
        # Not of the manager, which refuses contexts of other models.
        self._contexts.store.record(name, app)
        try:
            self._contexts.delete(name)
        finally:
            self.ended(app, name)

    def _facts(self, record: Record) -> ContextFacts:
        return ContextFacts(
            name=record.name,
            tokens=len(record.tokens),
            level=record.origin.level,
            pinned=record.pinned,
            stored_bytes=_stored_bytes(record),
            created_s=record.created_s,
            adapter=self._adapters.name_of(record.origin.adapter),
        )


class _TurnCall(ContextCall):
    """Forks a context before an answer, or changes its level, where the call asks for that; and stores it
    afterwards. A fork is deleted if its answer does not end by itself: nobody has been told its name."""

    def __init__(self, turns: ContextTurns, turn: ContextTurn, *, most_tokens: int) -> None:
        super().__init__(turns._contexts, turn.record, turn.record, most_tokens=most_tokens)
        self._turns, self._source = turns, turn
        self._forked = self._deleted = False

    def begin(self, run: Run) -> None:
        """See `Lifecycle`."""
        if self._source.forks:
            self.record = self._turns.forked(self._source)
            self._forked = True
        app, name, level = self.record.app, self.record.name, run.request.level
        moved = self._contexts.moving(app, name, level)
        self.record = self._base = self._contexts.at_level(app, name, level)
        super().begin(run)
        self.restoration = dataclasses.replace(self.restoration, moved=moved)

    def finish(self, run: Run) -> None:
        """See `Lifecycle`."""
        kept = False
        try:
            super().finish(run)
            kept = run.finish_reason is not None
        finally:
            if self._forked and not kept and not self._deleted:
                self._deleted = True
                self._turns.dropped(self.record)

    def failed(self, run: Run) -> None:
        """See `Lifecycle`."""
        super().failed(run)
        if self._deleted:
            self._contexts.pending_errors.forget(self.record.name)


def _computed(record: Record, before: int, prompt_tokens: int) -> int:
    size = record.origin.chunk_tokens
    if record.state_tokens:
        # States are of use with all chunks, or not at all.
        return max(1, prompt_tokens - (record.state_tokens if all(record.files) else 0))
    stored = sum(map(bool, record.files[: before // size]))
    return max(1, prompt_tokens - stored * size)


def _stored_bytes(record: Record) -> int:
    widths = Counter(bits for bits, file in zip(record.bits, record.files, strict=False) if file)
    return sum(count * sum(record.origin.layer_bytes.get(bits, ())) for bits, count in widths.items())


def _gone(name: str) -> ContextGone:
    return ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")
