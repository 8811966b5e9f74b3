"""Manages apps' contexts in the engine's thread: prepares and begins turns in them, creates, pins and deletes
them.

Contexts are looked up by app and name together, so that another app's name is as unknown as one that never
existed. This module imports no JAX.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxllm.config import FULL_LEVEL
from jaxllm.contexts.codecs import RAW, STATE
from jaxllm.errors import ConfigError, ContextGone, JaxllmError
from jaxllm.serving.contexts.record import Record, TurnTokens
from jaxllm.serving.elastic.objectives import Cost, EnergyBudget
from jaxllm.serving.elastic.planned_service import ANYTHING
from jaxllm.serving.elastic.planner import Load, level_of_turn
from jaxllm.serving.engine.request import Request
from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
from jaxllm.serving.server.calls import Call, ContextFacts, call_turn_ids
from jaxllm.serving.server.job import ContextTurn
from jaxllm.serving.server.limits import AppLimits, require_room


class ContextTurns:
    """The contexts of a service. Methods are for the engine's thread unless noted.

    Args:
      service: plans and answers, in its `contexts`: those of a live engine
        (`jaxllm.serving.contexts.manager.Contexts`) or of exported programs.
      turn_call: makes the lifecycle of a turn.
      adapters: adapters of the service.
      limits_of: returns an app's limits now.
    """

    def __init__(
        self,
        service: Any,
        turn_call: Callable[["ContextTurns", ContextTurn], Any],
        adapters: Any,
        limits_of: Callable[[str], AppLimits],
    ) -> None:
        self._service, self._contexts, self._adapters = service, service.contexts, adapters
        self._turn_call, self.limits_of = turn_call, limits_of
        # For other threads, which must not access the store.
        store = self._contexts.store
        self._known: dict[tuple[str, str], Record] = {(each.app, each.name): each for each in store.records()}
        self._damaged = frozenset((each.app, each.name) for each in store.damage())
        self._count_pinned()

    @property
    def room_bytes(self) -> int:
        """Memory for chunks of running contexts: the budget without pinned ones. From any thread."""
        return max(0, self._contexts.memory.budget_bytes - self._pinned_bytes)

    def resize(self, budget_bytes: int) -> None:
        """Sets the memory limit of contexts' chunks; raises BudgetExceeded if running or pinned ones need
        more."""
        self._contexts.resize(budget_bytes)

    def require(self, app: str, name: str) -> None:
        """Checks that an app has a context. From any thread. Raises ContextGone if the app has no context of
        this name."""
        # An empty name: the app has contexts that could not be listed; the engine's thread decides.
        if (app, name) not in self._known and not {(app, name), (app, "")} & self._damaged:
            raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")

    def figures(self) -> dict[str, dict[str, Any]]:
        """Contexts by app, and their chunks in memory by width. From any thread."""
        figures: dict[str, dict[str, Any]] = {}
        for record in list(self._known.values()):
            none = {"contexts": 0, "pinned": 0, "stored_bytes": 0, "chunks": Counter[str]()}
            of_app = figures.setdefault(record.app, none)
            of_app["contexts"] += 1
            of_app["pinned"] += record.pinned
            of_app["stored_bytes"] += _stored_bytes(record)
            of_app["chunks"].update(
                "raw" if each.bits in (RAW, STATE) else str(each.bits)
                for each in self._contexts.memory.chunks(record.name).values()
            )
        return figures

    # -- calls ------------------------------------------------------------------------------------

    def turn(self, call: Call, *, free: bool = True) -> ContextTurn:
        """Encodes a call's turn in its context. `free`: whether no other call continues the context.

        Raises:
          ContextGone: the app has no context of this name, its tokens are of another tokenizer, or its
            adapter is not loaded and the call names none.
          ConfigError: the call names another adapter, the prompt is not a turn (see `conversation_turn_ids`),
            the context has fewer tokens than the call names, or the objective limits energy.
          ContextOverflow: context and turn are longer than the window.
          BudgetExceeded: the app's contexts have reached their limit; or see `Contexts.ready`.
          CheckpointError: the context cannot be read; or see `Contexts.ready`.
        """
        contexts, engine, profile = self._contexts, self._service.engine, self._service.profile
        if isinstance(call.objective, EnergyBudget):
            raise ConfigError("energy budgets are not supported in contexts; set a time limit")
        record, adapter = self._own(call.app, call.context, call.adapter)
        limits = self.limits_of(call.app)
        if limits.stored_bytes:
            require_room(limits, self.listed(call.app))
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
        tokenizer = engine.tokenizer.limited(engine.options.context_tokens)
        new, rows = call_turn_ids(tokenizer, call, before)
        asked = TurnTokens.after(record, before, new, engine.tokenizer, engine.cfg)
        rows = PromptEmbeddings.joined((0, contexts.rows_before(record, len(before))), (len(before), rows))
        request = engine.request(asked.prompt, config, level=level, rows=rows, source=asked.source)
        request.require_served_by(engine.runner_at(level))
        if rows is not None:
            # With ids in place of the rows.
            asked = dataclasses.replace(asked, prompt=request.prompt)
        # A source is encoded again unless its context ran last.
        prompt = asked.all_tokens
        size = record.origin.chunk_tokens
        cached = size * sum(map(bool, record.files[: len(before) // size]))
        if record.state_tokens:
            # States are usable only with all chunks.
            cached = record.state_tokens if all(record.files) else 0
        computed = max(1, len(prompt) - cached)

        def cost(level: int, tokens: int) -> Cost:
            ttft_ms, tpot_ms = profile.ttft(level, tokens), profile.tpot(level, len(prompt))
            return Cost(
                ttft_ms=ttft_ms, tpot_ms=tpot_ms, tokens=config.max_tokens, thought_tokens=call.thought_tokens
            )

        costs = {level: cost(level, computed)}
        if call.objective is not None:
            costs |= {each: cost(each, len(prompt)) for each in engine.levels if each != level}
        most = len(request.prompt) + config.max_tokens
        return ContextTurn(
            record=record, before=len(before), asked=asked, computed_tokens=computed,
            whole=cost(FULL_LEVEL, computed), costs=costs, most_tokens=most,
            most_bytes=max(1, *(contexts.chunk_bytes(record, most, each) for each in costs)), adapter=adapter,
            forks=forks, rows=rows,
        )  # fmt: skip

    def begin(self, turn: ContextTurn, call: Call, load: Load) -> tuple[Request, Any]:
        """The request of a turn, and the lifecycle that restores and stores its context. A call with an
        objective is answered by the largest level that meets it, others by the context's level. Raises
        ObjectiveMissed if no level meets the objective, and the call is strict."""
        level = turn.record.origin.level
        objective = call.objective or (ANYTHING if load.work_share < 1 else None)
        if objective is not None:
            margin, strict = self._service.planner.safety_margin, bool(call.strict)
            level = level_of_turn(turn.costs, objective, turn.whole, margin=margin, load=load, strict=strict)
        request = self._service.engine.request(
            turn.asked.prompt, call.config, level=level, rows=turn.rows, source=turn.asked.source
        )
        return request, self._turn_call(self, turn)

    def ended(self, app: str, name: str) -> None:
        """Updates the state of a context that was changed or deleted. One that is unreadable stays known."""
        with contextlib.suppress(JaxllmError):
            self._stored(app, name)
        self._count_pinned()

    def _own(self, app: str, name: str, asked: str = "") -> tuple[Record, str]:
        """An app's context and its adapter, after applying the adapter."""
        digest = self._stored(app, name).origin.adapter
        adapter = self._adapters.of_context(digest, name, asked)
        self._adapters.use(adapter)
        return self._contexts.record(app, name), adapter

    def _stored(self, app: str, name: str) -> Record:
        """An app's context from the store, and makes it known to other threads; after an error other than
        ContextGone it is unknown whether the context exists."""
        try:
            record = self._known[app, name] = self._contexts.store.record(name, app)
        except ContextGone:
            self._known.pop((app, name), None)
            raise
        return record

    def _count_pinned(self) -> None:
        pinned = [each for each in self._known.values() if each.pinned]
        self._pinned_bytes = sum(map(self._contexts.chunk_bytes, pinned))

    # -- contexts ---------------------------------------------------------------------------------

    def create(
        self, app: str, *, level: int | None = None, pinned: bool = False, adapter: str = ""
    ) -> ContextFacts:
        """Creates a context of an app.

        Raises:
          ConfigError: the level is not served.
          AdapterGone: no adapter has this name.
          BudgetExceeded: the app has reached its number of contexts.
        """
        require_room(self.limits_of(app), self.listed(app), new=True, pin="" if pinned else None)
        self._adapters.use(adapter)
        record = self._contexts.create(app, level=level, pinned=pinned)
        self._known[app, record.name] = record
        return self._facts(record)

    def listed(self, app: str) -> list[ContextFacts]:
        """All contexts of an app, including those of other models and levels."""
        return [self._facts(each) for each in self._contexts.store.records(app)]

    def found(self, app: str, name: str) -> ContextFacts:
        """A context of an app.

        Raises:
          ContextGone: the app has no context of this name.
          CheckpointError: it cannot be read; `Unreadable` if that may be temporary.
        """
        return self._facts(self._stored(app, name))

    def pin(self, app: str, name: str, pinned: bool) -> ContextFacts:
        """Pins a context, or unpins it; raises ContextGone, or BudgetExceeded if the app has too many."""
        self._own(app, name)
        if pinned:
            require_room(self.limits_of(app), self.listed(app), stored=False, pin=name)
        record = self._known[app, name] = self._contexts.pin(name, pinned)
        self._count_pinned()
        return self._facts(record)

    def delete(self, app: str, name: str) -> None:
        """Deletes a context, which must not be answering; raises ContextGone."""
        # Via the store: the manager refuses contexts of other models.
        self._stored(app, name)
        try:
            self._contexts.delete(name)
        finally:
            self.ended(app, name)

    def _facts(self, record: Record) -> ContextFacts:
        return ContextFacts(
            name=record.name, tokens=len(record.tokens), level=record.origin.level, pinned=record.pinned,
            stored_bytes=_stored_bytes(record), created_s=record.created_s,
            adapter=self._adapters.name_of(record.origin.adapter),
        )  # fmt: skip


def _stored_bytes(record: Record) -> int:
    widths = Counter(bits for bits, file in zip(record.bits, record.files, strict=False) if file)
    return sum(count * sum(record.origin.layer_bytes.get(bits, ())) for bits, count in widths.items())
