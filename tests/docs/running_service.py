"""A service, and what runs the documentation's blocks that call it.

Blocks name 127.0.0.1:8080, the socket of a user, and a context called NAME; the service listens elsewhere,
and NAME is the last context that a block of the page has made.
"""

import contextlib
import io
import json
import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxllm.checkpoints.peft import write_adapter
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.ground.bundles import open_model
from tests.docs.pages import Block, commands_of
from tests.docs.world import at_hand, close_all, require_printed
from tests.models.test_lora import random_adapter
from tests.serving.server.daemons import Process

_URL = "http://127.0.0.1:8080"
_SOCKET = "/run/user/1000/jaxllm.sock"
# Those that the guide of the service loads: from the start, and later.
_ADAPTERS = ("formal", "kind-2")


class RunningService:
    """A service with contexts and adapters, and the blocks that call it."""

    def __init__(self, folder: Path, cache: Path, model: str = "default") -> None:
        """Starts it.

        Args:
          folder: an empty one, for all that it keeps.
          cache: of compiled buckets and profiles.
          model: that answers.
        """
        self._folder, self._socket = folder, folder / "jaxllm.sock"
        cfg = open_model(model).cfg
        for seed, name in enumerate(_ADAPTERS):
            lora = LoraConfig(rank=2, alpha=4)
            write_adapter(folder / "adapters" / name, cfg, lora, random_adapter(cfg, lora, seed))
        self._process = Process(
            folder, "--model", model, "--http", "127.0.0.1:0", "--socket", self._socket,
            "--contexts", folder / "contexts",
            "--adapter", f"formal={folder / 'adapters/formal'}", "--adapters", folder / "adapters",
            environment={"JAXLLM_CACHE": str(cache)},
        )  # fmt: skip
        self._names: dict[str, Any] = {}
        self._context = "NAME"

    def __enter__(self) -> Self:
        self._process.until(lambda: "ready:" in self._process.text())
        found = re.search(r"listening on (http://[\d.:]+)", self._process.text())
        assert found, self._process.text()
        self._url = found[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        close_all(self._names)
        if kind is None:
            self._process.signal(signal.SIGTERM)
            assert self._process.ended() == 0, self._process.text()
        else:
            self._process.kill()

    def turn_page(self) -> None:
        """Forgets what blocks of the page before have left."""
        close_all(self._names)
        self._names["__name__"], self._context = "__main__", "NAME"

    def run(self, block: Block) -> None:
        """Runs a block.

        Raises:
          AssertionError: a command or a request of it fails.
        """
        block = at_hand(block)
        if block.language == "python":
            source = block.body.replace(_URL, self._url).replace(_SOCKET, str(self._socket))
            before = dict(self._names)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * block.line + source, block.page, "exec"), self._names)
            require_printed(printed.getvalue(), block)
            # A client whose name a block gives to the next would leave its socket to some later test.
            close_all({name: value for name, value in before.items() if self._names.get(name) is not value})
        for command in commands_of(block) if block.language == "sh" else ():
            self._ask(command.replace(_URL, self._url).replace("NAME", self._context), block.place)

    def _ask(self, command: str, place: str) -> None:
        """Runs a command of curl; what it is told must be an answer."""
        assert command.startswith("curl "), f"{place}: {command}: only curl is run beside a service"
        asked = command.replace("curl ", "curl --silent --show-error --write-out '\\n%{http_code}' ", 1)
        environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(self._folder), "OPERATOR_KEY": "none"}
        ran = subprocess.run(
            ["bash", "-c", asked], env=environment, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, f"{place}: {command}: {ran.stderr}"
        body, _, status = ran.stdout.rpartition("\n")
        # A call that insists may be told that nothing is in time.
        allowed = ("200", "201", "422") if "strict" in command else ("200", "201")
        assert status in allowed, f"{place}: {command}: {ran.stdout}"
        with contextlib.suppress(json.JSONDecodeError):
            told = json.loads(body)
            if told.get("object") == "context":
                self._context = told["id"]
