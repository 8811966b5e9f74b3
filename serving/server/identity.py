"""Tells which app calls: by the process behind a Unix socket, or by an API key over HTTP.

    identity = Identity(IdentityOptions(), KeyFile(default_keys_file()))
    app = identity.identify(scope)      # raises Unauthorized

Over a Unix socket the kernel names the process, and keys are neither needed nor looked at: ordinary clients
always send one. Over HTTP a key is needed as soon as the file of keys exists; until then callers on the
loopback are the app `local`, and others are refused.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

from jaxllm.errors import ConfigError, JaxllmError
from serving.server.keys import KeyFile
from serving.server.peer import is_loopback, peer_of, require_app

_log = logging.getLogger(__name__)
# Where an app is kept in the scope once it is known; no client can write there.
_APP = "jaxllm.app"
_OPERATOR = "jaxllm.operator"


def identified_app(scope: Mapping[str, Any]) -> str:
    """The app of a request that was identified before; empty where it was not."""
    return scope.get(_APP, "")


class Unauthorized(JaxllmError):
    """It is not known who calls (HTTP 401).

    Attributes:
      code: for programs: "missing_api_key", "invalid_api_key" or "unknown_peer".
    """

    def __init__(self, message: str, *, code: str = "invalid_api_key") -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdentityOptions:
    """Options of identity.

    Attributes:
      local_app: the app of callers on the loopback as long as there is no file of keys.
      remote: serve other machines, too. Takes keys.
    """

    local_app: str = "local"
    remote: bool = False

    def __post_init__(self) -> None:
        require_app(self.local_app)


class Identity:
    """Finds the app of a request. For the event loop's thread.

    Attributes:
      options: see `IdentityOptions`.
      keys: of apps; None for no keys, ever.
    """

    def __init__(self, options: IdentityOptions | None = None, keys: KeyFile | None = None) -> None:
        self.options, self.keys = options or IdentityOptions(), keys

    def require_address(self, host: str) -> None:
        """Checks an address that the service is about to listen on.

        Raises:
          ConfigError: other machines could reach it and that was not asked for, or there are no keys.
        """
        if is_loopback(host):
            return
        if not self.options.remote:
            raise ConfigError(
                f"{host!r:.80} is not a loopback address, so other machines could reach the service; use "
                "127.0.0.1, or set remote = true in the file of options (--config)"
            )
        if self.keys is None or not self.keys.needed():
            raise ConfigError(
                f"{host!r:.80} can be reached by other machines, and there are no API keys; make one with "
                "`jaxllm keys add APP`"
            )

    def identify(self, scope: Mapping[str, Any]) -> str:
        """The app of a request.

        Args:
          scope: ASGI's, of a server that runs `serving.server.peer.protocol`.

        Raises:
          Unauthorized: it has no key, or an unknown one.
        """
        if known := identified_app(scope):
            return known
        app, operator = self._found(scope)
        if isinstance(scope, dict):
            scope[_APP], scope[_OPERATOR] = app, operator
        return app

    def operates(self, scope: Mapping[str, Any]) -> bool:
        """Whether a request may watch the service, and so all of its apps, and change what all have: root and
        the service's own user over the Unix socket, an operator's key over HTTP, and who is on the loopback
        where no keys are needed.

        Args:
          scope: see `identify`.

        Raises:
          Unauthorized: see `identify`.
        """
        self.identify(scope)
        return scope.get(_OPERATOR, False)

    def _found(self, scope: Mapping[str, Any]) -> tuple[str, bool]:
        """The app of a request, and whether it operates."""
        peer = peer_of(scope)
        if peer is not None and peer.app:
            own = peer.credentials is not None and peer.credentials.uid in (0, os.geteuid())
            return peer.app, own
        try:
            needed = self.keys is not None and self.keys.needed()
            if not needed:
                if peer is not None and peer.is_loopback:
                    return self.options.local_app, True
                raise Unauthorized(
                    "other machines may not call this service without an API key, and it has none",
                    code="unknown_peer",
                )
            assert self.keys is not None
            key = _key(scope)
            if not key:
                raise Unauthorized(
                    "an API key is missing; send it as `Authorization: Bearer KEY`", code="missing_api_key"
                )
            stored = self.keys.find(key)
        except ConfigError as error:
            # Whatever is wrong with the file is not for callers to know.
            _log.error("API keys cannot be checked: %s", error)
            raise Unauthorized("API keys cannot be checked now; see the service's log") from error
        if stored is None:
            raise Unauthorized("the API key is not valid; make one with `jaxllm keys add APP`")
        return stored.app, stored.operator


def _key(scope: Mapping[str, Any]) -> str:
    """The key in a request's headers; empty for none, or where several differ."""
    found = set()
    for name, value in scope.get("headers") or ():
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.add(rest.strip())
    return found.pop().decode("latin-1") if len(found) == 1 else ""
