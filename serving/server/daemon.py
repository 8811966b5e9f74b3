"""Runs the service: binds sockets, opens the model, answers, and drains when stopped.

    run(ServerOptions(socket=Path("/run/user/1000/jaxllm.sock")))

While the model is loading calls are refused with "loading". SIGTERM and SIGINT refuse new calls and let
running ones end; a second signal ends the process at once. SIGHUP reloads the apps' limits and the memory
of contexts. systemd is notified by the protocol of sd_notify.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvicorn
import uvloop

from jaxllm.errors import JaxllmError, one_line
from jaxllm.serving.host.machine import raise_open_files
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.server.backend import Backend
from jaxllm.serving.server.identity import Identity, KeyFile, default_keys_file
from jaxllm.serving.server.limits import Bindings
from jaxllm.serving.server.logs import writing_logs
from jaxllm.serving.server.metrics import metric_routes
from jaxllm.serving.server.pages import PAGES
from jaxllm.serving.server.service_options import ServerOptions, read_options
from jaxllm.serving.server.sockets import bound, described, is_loopback, protocol

_log = logging.getLogger(__name__)


class Opened(Protocol):
    """An open model, live or of exported programs. `start` opens the backend on its executor; `close` closes
    the service with its contexts and engine, and raises the error of an answer that could not be stored.

    Attributes:
      service: plans and answers, in `contexts`, None for none.
    """

    service: Any

    def start(self, backend: Backend) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


Opener = Callable[[Progress], Opened]


class Notifier:
    """Sends states to systemd's notification socket, if there is one.

    Attributes:
      watchdog_s: interval of WATCHDOG=1 after which systemd restarts the service; None for never.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Removes the variables from the environment, so that no child process notifies systemd."""
        name = environment.pop("NOTIFY_SOCKET", "")
        period, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        # Names that begin with @ are abstract sockets.
        self._name = "\0" + name[1:] if name.startswith("@") else name
        own = bool(name) and pid in ("", str(os.getpid()))
        self.watchdog_s = int(period) / 1e6 if own and period.isdecimal() and int(period) else None

    def send(self, *states: str) -> None:
        """Sends states such as "READY=1". Errors are ignored: systemd's timeout decides."""
        if not self._name:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            try:
                out.sendto("\n".join(states).encode(), self._name)
            except OSError:
                return


_LOOK_S = 0.5
# Time for clients to read the rest of their answers after the last event.
_FLUSH_S = 5
# Time of a dispatch beyond the deadline of draining.
_LATE_S = 30.0


def run(options: ServerOptions, opener: Opener, *, config: Path | None = None) -> None:
    """Runs the service until a signal ends it. In the main thread; logs go to stderr.

    Args:
      options: options of the service.
      opener: opens the model, and reports its progress; called in its own thread.
      config: file that SIGHUP reloads limits from; None for none.

    Raises:
      ConfigError: the sockets cannot listen, or options contradict each other.
      JaxllmError: the model cannot be opened, or the engine has failed.
    """
    # Check options before there is a socket.
    options.context_options()
    raise_open_files()
    notifier = Notifier(os.environ)
    identity = Identity(
        KeyFile(options.keys or default_keys_file()), remote=options.remote, own_key=options.api_key
    )
    places = options.address, options.socket, options.socket_mode
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    with bound(*places, identity.require_address) as sockets, writing_logs(sys.stderr, level):
        daemon = Daemon(options, opener, identity, notifier, config=config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(daemon.serve(sockets))
    if daemon.loading:
        # Compiling cannot be interrupted; its results are cached.
        _leave(0)


class Daemon:
    """The service from start to end. For one event loop.

    Attributes:
      backend: backend of the front.
    """

    def __init__(
        self,
        options: ServerOptions,
        opener: Opener,
        identity: Identity,
        notifier: Notifier,
        *,
        config: Path | None = None,
    ) -> None:
        self.backend = Backend(options.limits, Bindings(options.objectives))
        self._opening = concurrent.futures.Future[Opened]()
        self._options, self._notifier, self._config = options, notifier, config
        self._identity, self._opener, self._draining = identity, opener, False
        self._stop, self._failure = asyncio.Event(), ""

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Serves until stopped. Raises JaxllmError if the model cannot be opened, or the engine has
        failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_asked)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        server = _Server(self._server_config())
        serving = asyncio.create_task(server.serve(sockets=list(sockets)))
        watching = asyncio.create_task(self._watch())
        stopping = asyncio.create_task(self._stop.wait())
        for each in sockets:
            _log.info("listening on %s", described(each))
        for warning in self._open_doors(sockets):
            _log.warning("%s", warning)
        # A daemon thread: compiling cannot be interrupted.
        threading.Thread(target=self._open, name="loading", daemon=True).start()
        opening, opened = asyncio.wrap_future(self._opening), None
        try:
            ending = {stopping, serving, watching}
            await asyncio.wait({opening, *ending}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opened = opening.result()
                if (contexts := opened.service.contexts) is not None:
                    # Responses outlive the service where contexts do.
                    self._front.store_responses(contexts.store.root, contexts.store.vault)
                opened.start(self.backend)
                name = self.backend.facts().name
                self._notifier.send("READY=1", f"STATUS=serving {name}")
                _log.info("ready: %s answers", name)
                if self._options.open_browser:
                    threading.Thread(target=_browse, args=(described(sockets[0]),), daemon=True).start()
                await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                # Without the watchdog a failing engine would go unnoticed.
                watching.result()
            await self._drain()
        finally:
            server.should_exit = True
            await serving
            watching.cancel()
            stopping.cancel()
            self.backend.close()
            self._front.responses.close()
            if opened is not None:
                try:
                    # An error may have left the engine's thread running.
                    if (executor := self.backend.executor) is not None:
                        await asyncio.to_thread(executor.stop, 0)
                    await asyncio.to_thread(opened.close)
                except JaxllmError as error:
                    # No call is left to raise it.
                    _log.error("%s", error)
        if self._failure:
            raise JaxllmError(self._failure)

    def _open_doors(self, sockets: Sequence[socket.socket]) -> Iterator[str]:
        """What others may do with the service that they perhaps should not."""
        options, over_tcp = self._options, [each for each in sockets if each.family != socket.AF_UNIX]
        keyless = bool(over_tcp) and not self._identity.needs_key
        if keyless:
            yield (
                "there is no API key: every user and program of this machine may call over HTTP, as one app, "
                "with an operator's rights; give a key ($JAXLLM_API_KEY), make keys of apps (`jaxllm keys "
                "add APP`), or listen on a Unix socket alone (--socket)"
            )
        if options.localhost_pages:
            without = ", without a key" if keyless else ""
            yield f"web pages that any program serves on this machine may call{without} (--localhost-pages)"
        if any(not is_loopback(each.getsockname()[0]) for each in over_tcp):
            yield "other machines may call, and HTTP is not encrypted: put a proxy with TLS before it"
        if options.socket is not None and options.socket_mode & 0o077:
            yield f"other users of this machine may call over {options.socket} (socket_mode)"

    def _server_config(self) -> uvicorn.Config:
        # Imported here only: the front knows nothing of the daemon.
        from jaxllm.serving.server.api.app import make_app

        guard = self._options.guard()
        app = make_app(
            self.backend,
            identify=self._identity.identify,
            guard=dataclasses.replace(guard, open_paths=guard.open_paths | PAGES),
            extra_routes=metric_routes(self.backend.metrics),
            on_request=self.backend.metrics.add_request,
        )
        self._front = app.state.api
        self._front.strict_fields = self._options.strict_fields
        return uvicorn.Config(
            app, http=protocol(self._options.apps), ws="none", lifespan="off", proxy_headers=False,
            server_header=False, log_config=None, log_level="warning", access_log=False,
            timeout_graceful_shutdown=_FLUSH_S,
        )  # fmt: skip

    def _open(self) -> None:
        try:
            self._opening.set_result(self._opener(self.backend.start))
        except BaseException as error:
            self._opening.set_exception(error)

    @property
    def loading(self) -> bool:
        """Whether a thread is opening the model."""
        return not self._opening.done()

    async def _drain(self) -> None:
        """Refuses new calls and waits for running ones to end, within the options' deadline."""
        self._draining = True
        self._notifier.send("STOPPING=1")
        self.backend.draining()
        executor = self.backend.executor
        if executor is None:
            return
        _log.info("draining: running answers have %g s", self._options.drain_s)
        late_s = self._options.drain_s + _LATE_S
        try:
            await asyncio.wait_for(asyncio.to_thread(executor.stop, self._options.drain_s), late_s)
        except TimeoutError:
            _log.error("the engine did not stop within %g s; the process ends without it", late_s)
            _leave(1)

    async def _watch(self) -> None:
        """Notifies systemd's watchdog while the engine is alive, and stops the service after it failed."""
        period_s = self._notifier.watchdog_s
        while True:
            executor = self.backend.executor
            if executor is not None and not executor.alive and not self._draining and not self._stop.is_set():
                self._failure = "the engine has failed; see the log, and start the service again"
                self._stop.set()
            if period_s is not None and self.backend.health()["alive"]:
                self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(_LOOK_S if period_s is None else min(_LOOK_S, period_s / 3))

    def _stop_asked(self) -> None:
        if self._stop.is_set():
            _log.warning("asked to stop again: the process ends at once")
            if self._options.socket is not None:
                self._options.socket.unlink(missing_ok=True)
            _leave(1)
        self._stop.set()

    def _reload(self) -> None:
        """Reloads the apps' limits and objectives; the old ones stay if the file is invalid."""
        if self._config is None:
            _log.warning("there are no limits to read again: the service was started without --config")
            return
        try:
            read = read_options(self._config, batch_rows=self._options.batch_rows)
        except JaxllmError as error:
            _log.error("limits stay as they are: %s", error)
        else:
            self.backend.limiter.limits = read.limits
            self.backend.bindings.given = read.objectives
            executor, budget_bytes = self.backend.executor, read.context_budget

            def resized(future: concurrent.futures.Future[None]) -> None:
                if (error := future.exception()) is None:
                    _log.info("contexts may take %s bytes of memory", f"{budget_bytes:,}")
                else:
                    # Such as running contexts that need more.
                    _log.error("the memory of contexts stays as it is: %s", one_line(error))

            if executor is not None and executor.contexts is not None and budget_bytes:
                try:
                    resize = executor.work("", lambda: executor.contexts.resize(budget_bytes))
                    resize.add_done_callback(resized)
                except JaxllmError as error:
                    _log.error("the memory of contexts stays as it is: %s", one_line(error))
            _log.info("limits were read from %s", self._config)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end answers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _browse(url: str) -> None:
    """Opens the dashboard in the user's browser, if there is one."""
    if not webbrowser.open(url):
        _log.warning("no browser could be opened; the dashboard is at %s", url)


def _leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads."""
    for each in logging.getLogger("jaxllm").handlers:
        each.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
