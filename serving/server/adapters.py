"""Stores a service's low-rank adapters by name, and applies the one that a call requests.

    adapters = Adapters(model, AdapterOptions(given={"mail": Path("adapters/mail")}, rank=8))
    adapters.use("mail")       before a dispatch, in the engine's thread; "" for none

All adapters have the same shapes, so that the model's buckets serve each of them: loading one, and switching
between two dispatches, compiles nothing.
"""

import dataclasses
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.errors import BudgetExceeded, ConfigError, ContextGone
from jaxllm.layer_configs import require_int
from jaxllm.options import check_options, option
from jaxllm.serving.server.calls import AdapterBusy, AdapterFacts, AdapterGone

if TYPE_CHECKING:
    from jaxllm.serving.opening.loading import LoadedModel
    from jaxllm.serving.weights.model_level import LoadedAdapter

ADAPTER_BYTES = 256 << 20
ADAPTERS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options of a service's adapters.

    Attributes:
      given: name -> folder of the adapters to load at startup.
      folder: folder of adapters that operators may load at runtime; None for no others.
      rank: maximum rank; 0 for that of the given ones, or 16 if others may be loaded.
      targets: matrices that adapters may change, of `jaxllm.models.lora.TARGETS`; by default all linear
        ones of attention and MLP.
      limit_bytes: memory limit of all factors.
      most: maximum number of adapters.
    """

    given: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    rank: int = option(0, low=0)
    targets: tuple[str, ...] = ()
    limit_bytes: int = option(ADAPTER_BYTES, low=1)
    most: int = option(ADAPTERS, low=1)

    def __post_init__(self) -> None:
        # Imported here: a service without adapters does not need it.
        from jaxllm.models.lora import MAX_RANK, TARGETS

        check_options(self)
        for name, folder in self.given.items():
            require_adapter_name(name)
            if not isinstance(folder, Path):
                raise ConfigError(f"the folder of the adapter {name!r} must be a path, got {folder!r:.80}")
        require_int("adapter_rank", self.rank, 0, MAX_RANK)
        if not set(self.targets) <= set(TARGETS):
            raise ConfigError(
                f"adapter_targets must be names of {', '.join(TARGETS)}, got {self.targets!r:.80}"
            )
        if len(self.given) > self.most:
            raise ConfigError(
                f"{len(self.given)} adapters are given, and adapter_count is {self.most}; raise it, "
                "or give fewer"
            )

    def path(self, folder: str) -> Path:
        """The path of a folder that an operator names, within `folder`.

        Raises:
          ConfigError: adapters may not be loaded at runtime, or the folder is elsewhere.
        """
        if self.folder is None:
            raise ConfigError(
                "this service loads no adapters while it runs; start it with a folder for them (--adapters)"
            )
        try:
            own = self.folder.resolve(strict=True)
            # Resolve links before checking the place.
            found = (own / folder).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise ConfigError(f"there is no folder {folder!r:.80} in the folder of adapters") from None
        if own not in found.parents or not found.is_dir():
            raise ConfigError(f"{folder!r:.80} is no folder in the folder of adapters")
        return found


class Adapters:
    """The adapters of one service. Methods are for the engine's thread unless noted."""

    def __init__(self, model: "LoadedModel", options: AdapterOptions | None = None) -> None:
        """Loads the given adapters.

        Raises:
          ConfigError, CheckpointError: one cannot be read, or does not fit the model or the options.
          BudgetExceeded: they exceed their number or memory limit.
        """
        self._model, self.options = model, options or AdapterOptions()
        # Replaced, never mutated: other threads read it.
        self._named: Mapping[str, tuple[AdapterFacts, LoadedAdapter]] = {}
        self._used = ""
        for name, folder in self.options.given.items():
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
        require_adapter_name(name)
        if name in self._named:
            raise AdapterBusy(f"there is an adapter {name!r}; delete it first, or choose another name")
        if len(self._named) >= self.options.most:
            raise BudgetExceeded(
                f"{len(self._named)} adapters are loaded, the maximum; delete one first, or raise "
                "adapter_count"
            )

    def read(self, name: str, folder: str) -> "LoadedAdapter":
        """Reads an adapter from the folder of adapters, for `add`. Answers continue meanwhile.

        Raises:
          ConfigError, CheckpointError, AdapterBusy, BudgetExceeded: see `Backend.load_adapter`.
        """
        self.require_addable(name)
        return self._read(self.options.path(folder))

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
        size, limit = self.size_bytes + loaded.size_bytes, self.options.limit_bytes
        if size > limit:
            raise BudgetExceeded(
                f"the adapters would need {size:,} bytes of at most {limit:,}; delete one first, or raise "
                "adapter_memory"
            )
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


def require_adapter_name(name: object) -> str:
    """Validates and returns the name of an adapter.

    Raises:
      ConfigError: the name is not valid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            "an adapter's name has 1 to 64 letters, digits, dots, underscores and hyphens, the first one a "
            f"letter or digit, got {name!r:.80}"
        )
    return name
