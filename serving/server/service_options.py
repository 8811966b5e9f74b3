"""Defines the options of the service, and reads them from a TOML file.

    options = read_options(Path("service.toml"))

Keys of the file are the fields of `ServerOptions`; `[scheduler]`, `[limits]`, `[limits.apps.NAME]`, `[apps]`,
`[objectives]` and `[adapter]` are sections. Sizes may be written as "1.5GB".
"""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import require_int
from jaxllm.option_types import Size
from jaxllm.options import check_options, option
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.elastic.objectives import Binding
from jaxllm.serving.server.limits import AppLimits, Limits, bound
from jaxllm.serving.server.memory import PREFIX_BYTES
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.sockets import (
    LOOPBACK_HOSTS,
    GuardOptions,
    require_key,
    require_name,
    require_rules,
)

DEFAULT_HTTP = "127.0.0.1:8080"
LOG_LEVELS = ("debug", "info", "warning", "error")
_MOST_FILE_BYTES = 1 << 20
_MOST_PORT = (1 << 16) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the service.

    Attributes:
      model: path or name of a model, see `jaxllm.serving.ground.bundles.find_model`; empty for the default.
      alias: the model's name in calls; empty for the one derived from `model`.
      http: host and port to listen on, such as "127.0.0.1:8080" or "[::1]:8080"; port 0 chooses a free one.
        Without it and `socket`, 127.0.0.1:8080.
      socket: path of a Unix socket to listen on; None for none.
      socket_mode: permissions of the socket: who may call.
      remote: whether other machines may call, with API keys.
      keys: file of API keys; None for the user's.
      api_key: an API key of the app `local`, an operator, in addition to those of the file; empty for none.
      hosts: host names of the service, besides those of the loopback and that of `http`.
      origins: origins of other sites' web pages that may call.
      localhost_pages: whether web pages that are served on this machine's loopback may call, too.
      open_browser: whether to open the dashboard in a browser once the service is ready.
      apps: rule -> app over the Unix socket. Rules are "uid:1000,exe:/usr/bin/mail" (a program of a user),
        "exe:/usr/bin/mail" (a program of the user that the service runs as) and "uid:1000" (a user). Rules
        with a program have precedence. A process without a rule is the app "uid-1000", by its user. Rules
        with a program only separate programs that trust each other: programs of one user can always read
        each other's memory.
      context_tokens: maximum number of tokens of prompt and answer together; 0 for the model's window,
        within bounds.
      memory: memory limit of the process in bytes; 0 for no limit.
      prefix_memory: memory limit of the caches of ended answers, which continue a conversation that is sent
        again; 0 for no such caches.
      model_sampling: whether calls without sampling options default to the model's recommended sampling.
      strict_fields: whether fields of bodies that no format declares are refused, rather than ignored.
      chat_template: file of a chat template that replaces the model's; None for the model's.
      draft: drafter as in `jaxllm generate --draft`; empty for its default.
      batch_rows: batch sizes of batched decoding, which requires native kernels; empty for no batching.
      contexts: folder of apps' stored contexts; None for no contexts.
      context_budget: memory limit of their chunks; 0 for the default of `ContextOptions`; reloaded at SIGHUP.
      follow_pressure: whether to release memory under memory pressure on the machine; always done with
        `memory`.
      context_keys: folder of keys, one per app, that encrypt contexts on storage; None for no encryption.
      images: whether to support images if the model has an image encoder: its weights and all of the
        model's are then resident.
      attend_quantized_kv: whether answers in contexts attend to stored chunks in place (see `EngineOptions`).
      share_across_apps: whether contexts may share prefixes of other apps' contexts (see `ContextOptions`).
      adapter: low-rank adapters that calls may name: name -> folder in PEFT's layout.
      adapters: folder of adapters that operators may load at runtime; None for no others.
      adapter_rank: maximum rank of adapters; 0 for that of the given ones, or 16 if others may be loaded.
      adapter_targets: matrices that adapters may change, of `jaxllm.models.lora.TARGETS`; by default all
        linear ones of attention and MLP.
      adapter_memory: memory limit of all factors.
      adapter_count: maximum number of adapters.
      log_level: minimum log level: "debug", "info", "warning" or "error"; requests are logged at "info".
      levels: levels of an elastic model to plan with, in percent; empty for all, (100,) for the whole model
        only.
      drain_s: time in seconds for running answers to end after a stop.
      scheduler: limits of the queue and of running calls.
      limits: limits of each app; reloaded at SIGHUP.
      objectives: app -> objective of its calls without one, until it binds itself; reloaded at SIGHUP.
    """

    model: str = ""
    alias: str = ""
    http: str = ""
    socket: Path | None = None
    socket_mode: int = option(0o600, low=1, high=0o777)
    remote: bool = False
    keys: Path | None = None
    api_key: str = dataclasses.field(default="", repr=False)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    localhost_pages: bool = False
    open_browser: bool = False
    apps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    context_tokens: int = option(0, low=0)
    memory: int = option(0, low=0)
    prefix_memory: int = option(PREFIX_BYTES, low=0)
    model_sampling: bool = True
    strict_fields: bool = False
    chat_template: Path | None = None
    draft: str = ""
    contexts: Path | None = None
    context_budget: int = option(0, low=0)
    follow_pressure: bool = False
    context_keys: Path | None = None
    share_across_apps: bool = False
    attend_quantized_kv: bool = False
    images: bool = True
    batch_rows: tuple[int, ...] = option(lambda: _batch_rows(), ascending=True)
    adapter: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    adapters: Path | None = None
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    adapter_memory: int = option(256 << 20, low=1)
    adapter_count: int = option(16, low=1)
    log_level: str = "info"
    levels: tuple[int, ...] = option((), low=1, high=FULL_LEVEL, ascending=True)
    drain_s: float = option(30.0, low=0, high=86_400.0)
    scheduler: SchedulerOptions = dataclasses.field(default_factory=SchedulerOptions)
    limits: Limits = dataclasses.field(default_factory=Limits)
    objectives: Mapping[str, Binding] = dataclasses.field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """The model's name in calls: its alias, or as given, without folder and suffix."""
        if self.alias:
            return self.alias
        return Path(self.model).name.removesuffix(".jaxllm") if self.model else "default"

    def __post_init__(self) -> None:
        check_options(self)
        choices: list[tuple[str, Sequence[object], Sequence[object]]] = [
            ("log_level", (self.log_level,), LOG_LEVELS)
        ]
        if self.batch_rows:
            choices.append(("batch_rows", self.batch_rows, _batch_rows()))
        if self.adapter_rank or self.adapter_targets:
            # Imported where they are given: exported programs, which have neither, run without JAX.
            from jaxllm.models.lora import MAX_RANK, TARGETS

            require_int("adapter_rank", self.adapter_rank, 0, MAX_RANK)
            choices.append(("adapter_targets", self.adapter_targets, TARGETS))
        for name, given, allowed in choices:
            if not set(given) <= set(allowed):
                known = ", ".join(map(str, allowed))
                raise ConfigError(f"{name} must be among {known}, got {getattr(self, name)!r:.80}")
        # Each validates its arguments.
        self.guard()
        require_rules(self.apps)
        require_key(self.api_key)
        if self.alias:
            require_name(self.alias, "an alias")
        if self.open_browser and self.address is None:
            raise ConfigError("a browser cannot open the dashboard over a Unix socket: give --http, too")
        for name, folder in self.adapter.items():
            require_name(name, "an adapter")
            if not isinstance(folder, Path):
                raise ConfigError(f"the folder of the adapter {name!r} must be a path, got {folder!r:.80}")
        if len(self.adapter) > self.adapter_count:
            raise ConfigError(
                f"{len(self.adapter)} adapters are given, adapter_count is {self.adapter_count}"
            )

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port to listen on; None for a Unix socket only."""
        if self.http or self.socket is None:
            return address_of(self.http or DEFAULT_HTTP)
        return None

    def guard(self) -> GuardOptions:
        """Options of the guard. Raises ConfigError if a host or an origin is malformed."""
        host = "" if self.address is None else self.address[0]
        own = [f"[{host}]" if ":" in host else host] if host else []
        hosts = dict.fromkeys((*LOOPBACK_HOSTS, *own, *self.hosts))
        return GuardOptions(hosts=tuple(hosts), origins=self.origins, localhost_pages=self.localhost_pages)

    def context_options(self) -> ContextOptions | None:
        """Options of contexts; None if the service has none. Raises ConfigError if there are options of
        contexts, but no folder for them."""
        for name in ("context_budget", "context_keys", "share_across_apps", "attend_quantized_kv"):
            if getattr(self, name) and self.contexts is None:
                raise ConfigError(f"{name} needs a folder for contexts: give the option contexts, too")
        if self.contexts is None:
            return None
        return ContextOptions(
            folder=self.contexts,
            budget_bytes=self.context_budget or ContextOptions.budget_bytes,
            encryption=self.context_keys,
            share_across_apps=self.share_across_apps,
            **self.limits.context_options(),
        )


def _batch_rows() -> tuple[int, ...]:
    """Default batch sizes."""
    # Imported here: a service of exported programs runs without JAX.
    from jaxllm.serving.ground.options import BATCH_ROWS

    return BATCH_ROWS


def address_of(text: str) -> tuple[str, int]:
    """Parses "HOST:PORT"; an IPv6 host is in brackets. Raises ConfigError if it is malformed."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    fits = port.isascii() and port.isdecimal() and len(port) <= len(str(_MOST_PORT))
    if not colon or not host or not fits or int(port) > _MOST_PORT or (":" in host and not bracketed):
        raise ConfigError(f"an address is HOST:PORT such as {DEFAULT_HTTP}, got {text!r:.80}")
    return (host[1:-1] if bracketed else host).lower(), int(port)


def read_options(path: Path, **defaults: Any) -> ServerOptions:
    """Reads options from a TOML file; what it does not name has its default, or one of `defaults`. Relative
    paths are relative to the file's folder. Raises ConfigError if the file cannot be read, is not TOML, or
    has an unknown key or invalid value."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: the options cannot be read ({error.strerror})") from error
    if len(text) > _MOST_FILE_BYTES:
        raise ConfigError(f"{path}: a file of options has at most {_MOST_FILE_BYTES:,} bytes")
    try:
        return _options({**defaults, **tomllib.loads(text.decode())}, path.parent)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error!s:.200}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _options(facts: dict[str, Any], folder: Path) -> ServerOptions:
    given = dict(_known("options", facts, ServerOptions, "option"))

    def path(value: Any) -> Any:
        return folder / Path(value).expanduser() if isinstance(value, str) and value else value

    given |= {name: path(given[name]) for name in _PATHS & given.keys()}
    given |= {name: read(name, given[name]) for name, read in _READ.items() if name in given}
    given["adapter"] = {name: path(each) for name, each in given.get("adapter", {}).items()}
    # Names of packaged models are not paths.
    if isinstance(model := given.get("model"), str) and ("/" in model or model.startswith("~")):
        given["model"] = str(path(model))
    return ServerOptions(**given)


def _size(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return Size().convert(value, None, None)
    except click.BadParameter as error:
        raise ConfigError(f"{name}: {error.message}") from error


def _limits(name: str, value: Any) -> Limits:
    facts = dict(_section(name, value))
    apps = _section(f"{name}.apps", facts.pop("apps", {}))

    def replaced(name: str, value: Any, limits: AppLimits) -> AppLimits:
        own = _known(name, value, AppLimits, "limit").items()
        own = {each: _size(each, limit) if each.endswith("_bytes") else limit for each, limit in own}
        return dataclasses.replace(limits, **own)

    default = replaced(name, facts, Limits().default)
    of_apps = {app: replaced(f"{name}.apps.{app}", own, default) for app, own in apps.items()}
    return Limits(default=default, apps=of_apps)


def _objectives(name: str, value: Any) -> dict[str, Binding]:
    found = {}
    for app, own in _section(name, value).items():
        try:
            found[require_name(app)] = bound(own)
        except ConfigError as error:
            raise ConfigError(f"[{name}] {app!r:.80}: {error}") from error
    return found


def _section(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a section, got {value!r:.80}")
    return value


def _known(name: str, value: Any, kind: type, what: str) -> Mapping[str, Any]:
    """A section whose keys are fields of a dataclass."""
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := _section(name, value).keys() - set(names):
        raise ConfigError(f"there is no {what} {min(unknown)!r:.80}; there are {', '.join(names)}")
    return value


_PATHS = {"chat_template", "socket", "keys", "contexts", "context_keys", "adapters"}
_SIZES = ("memory", "context_budget", "prefix_memory", "adapter_memory")
_READ: dict[str, Callable[[str, Any], Any]] = dict.fromkeys(_SIZES, _size) | {
    "scheduler": lambda name, value: SchedulerOptions(
        **_known(name, value, SchedulerOptions, f"key of [{name}]")
    ),
    "limits": _limits, "objectives": _objectives, "apps": _section, "adapter": _section,
}  # fmt: skip
