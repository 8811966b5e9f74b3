"""Stores a service's low-rank adapters by name, and applies the one that a call requests.

    adapters = Adapters(model, ServerOptions(adapter={"mail": Path("adapters/mail")}, adapter_rank=8))
    adapters.use("mail")       before a dispatch, in the engine's thread; "" for none

All adapters have the same shapes, so that the model's buckets serve each of them: loading one, and switching
between two dispatches, compiles nothing.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.serving.server.calls import AdapterBusy, AdapterFacts, AdapterGone
from jaxllm.serving.server.service_options import ServerOptions
from jaxllm.serving.server.sockets import require_name

if TYPE_CHECKING:
    from jaxllm.serving.opening.loading import LoadedModel
    from jaxllm.serving.weights.model_level import LoadedAdapter


class Adapters:
    """The adapters of one service. Methods are for the engine's thread unless noted."""

    def __init__(self, model: "LoadedModel", options: ServerOptions | None = None) -> None:
        """Loads the given adapters.

        Raises:
          ConfigError, CheckpointError: one cannot be read, or does not fit the model or the options.
          BudgetExceeded: they exceed their number or memory limit.
        """
        self._model, self.options = model, options or ServerOptions()
        # Replaced, never mutated: other threads read it.
        self._named: Mapping[str, tuple[AdapterFacts, LoadedAdapter]] = {}
        self._used = ""
        for name, folder in self.options.adapter.items():
            self.add(name, self._read(folder))

    # -- from any thread --------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all loaded adapters."""
        return tuple(self._named)

    def facts(self) -> list[AdapterFacts]:
        """Facts of all loaded adapters."""
        return [facts for facts, _ in self._named.values()]

    @property
    def size_bytes(self) -> int:
        """Memory of their factors."""
        return sum(each.size_bytes for each in self.facts())

    def require(self, name: str) -> None:
        """Checks that an adapter is loaded; "" means none.

        Raises:
          AdapterGone: no adapter has this name.
        """
        if name and name not in self._named:
            known = ", ".join(map(repr, self.names[:20])) or "none"
            raise AdapterGone(f"the model has no adapter {name!r:.80}; it has {known}")

    def require_addable(self, name: str) -> None:
        """Checks that an adapter may be added under this name.

        Raises:
          ConfigError: the name is not valid.
          AdapterBusy: the name is in use.
          BudgetExceeded: the maximum number is loaded.
        """
        require_name(name, "an adapter")
        if name in self._named:
            raise AdapterBusy(f"there is an adapter {name!r}; delete it first, or choose another name")
        if len(self._named) >= self.options.adapter_count:
            count = len(self._named)
            raise BudgetExceeded(f"{count} adapters are loaded, the limit; delete one or raise adapter_count")

    def read(self, name: str, folder: str) -> "LoadedAdapter":
        """Reads an adapter from the folder of adapters, for `add`. Answers continue meanwhile.

        Raises:
          ConfigError, CheckpointError, AdapterBusy, BudgetExceeded: see `Backend.load_adapter`.
        """
        self.require_addable(name)
        if self.options.adapters is None:
            raise ConfigError("the service loads no adapters at runtime; start it with --adapters FOLDER")
        try:
            own = self.options.adapters.resolve(strict=True)
            # Resolve links before checking the place.
            found = (own / folder).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise ConfigError(f"there is no folder {folder!r:.80} in the folder of adapters") from None
        if own not in found.parents or not found.is_dir():
            raise ConfigError(f"{folder!r:.80} is no folder in the folder of adapters")
        return self._read(found)

    def _read(self, folder: Path) -> "LoadedAdapter":
        if (modes := self._model.runners.modes) is not None:
            modes.require_adaptable()
        return self._model.load_adapter(folder)

    def name_of(self, digest: str) -> str:
        """The name of the adapter with a digest; the digest itself if it is not loaded, empty for none."""
        return self._name(digest) or digest

    def of_context(self, digest: str, context: str, asked: str) -> str:
        """The adapter of a context's turn.

        Args:
          digest: digest of the adapter that the context was made with; empty for none.
          context: name of the context.
          asked: name of the adapter that a call requests; empty for the context's own. If that is no longer
            loaded, the context continues with the requested one.

        Raises:
          ContextGone: the context's adapter is not loaded, and the call requests none.
          ConfigError: the call requests another adapter.
          AdapterGone: the requested adapter is no longer loaded.
        """
        self.require(asked)
        name = self._name(digest)
        if name is None:
            if asked:
                return asked
            raise ContextGone(
                f"the context {context} was made with an adapter that is not loaded ({digest}); load it "
                "again, or name another one in the call, which then computes the context's tokens again"
            )
        if asked and self._named[asked][0].digest != digest:
            own = f"the adapter {name!r}" if name else "no adapter"
            raise ConfigError(
                f"the context {context} was made with {own}, and its cache is of no use to {asked!r:.80}; "
                "leave the adapter out, or make another context"
            )
        return asked or name

    # -- the engine's thread ----------------------------------------------------------------------

    def use(self, name: str) -> None:
        """Applies an adapter to the model at negligible cost; "" for none.

        Raises:
          AdapterGone: it is no longer loaded.
        """
        if name == self._used:
            return
        self.require(name)
        self._model.use_adapter(self._named[name][1] if name else None)
        self._used = name

    def add(self, name: str, loaded: "LoadedAdapter") -> AdapterFacts:
        """Makes a read adapter available to calls.

        Raises:
          ConfigError, AdapterBusy, BudgetExceeded: see `require_addable`.
          BudgetExceeded: also if all adapters together would need too much memory.
        """
        self.require_addable(name)
        size, limit = self.size_bytes + loaded.size_bytes, self.options.adapter_memory
        if size > limit:
            message = f"the adapters would need {size:,} bytes of at most {limit:,} (adapter_memory)"
            raise BudgetExceeded(f"{message}; delete one first")
        facts = AdapterFacts(
            name=name, digest=loaded.digest, size_bytes=loaded.size_bytes, created_s=time.time()
        )
        self._named = {**self._named, name: (facts, loaded)}
        return facts

    def unload(self, name: str) -> Collection[tuple[int, int]]:
        """Unloads an adapter that no call uses.

        Returns:
          The versions of weights with it, whose caches are stale.

        Raises:
          AdapterGone: no adapter has this name.
        """
        self.require(name)
        if self._used == name:
            self.use("")
        _, loaded = self._named[name]
        self._named = {other: kept for other, kept in self._named.items() if other != name}
        return loaded.versions

    def _name(self, digest: str) -> str | None:
        """The name of the adapter with a digest; empty for none, None if it is not loaded."""
        if not digest:
            return ""
        return next((name for name, (facts, _) in self._named.items() if facts.digest == digest), None)
