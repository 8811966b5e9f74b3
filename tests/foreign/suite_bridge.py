"""A pytest plugin that runs llama.cpp's and vLLM's server tests against this service.

Bridged are only how a server is started, paths without /v1, and the names of models; vLLM's own modules,
which its tests import for other purposes, are stubs. What does not concern the protocols that are served
here is skipped with a reason. The runner is `tests.foreign.server_suites`.
"""

import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent.parent
MODEL = os.environ.get("JAXLLM_SUITE_MODEL", "default")
ROOT_OF_TESTS = Path.cwd()
# Fixtures of vLLM's tests with a server.
SERVERS = {"client", "server", "async_client", "remote_server", "server_url"}
# Reasons, by parts of the tests' ids.
SKIPPED: dict[str, str] = json.loads((Path(__file__).parent / "suite_skips.json").read_text())
# Paths and flags of llama.cpp's server alone.
OWN_PATHS = re.compile(
    r'"/(completion|embedding|slots|infill|rerank\w*|lora-adapters|metrics|props|(de)?tokenize)["?/]'
)
OWN_FLAGS = re.compile(
    r"server\.(api_key|model_hf_repo|server_slots|gcp_compat|pooling|captured_headers|media_path|lora_files|"
    r"ui_mcp_proxy|server_tools|server_host) ="
)


# Their servers have ChatML for models without a template.
DEFAULT = {"chat_template": str(Path(__file__).with_name("chatml.jinja"))}


class Service:
    """The running service, started again where other options are wanted."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.options: dict[str, Any] = {}
        self.port = 0

    def require(self, **options: Any) -> int:
        """The port of a service with these options of its file."""
        if self.process is None or self.process.poll() is not None or self.options != options:
            self.stop()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            self.options = options
            config = Path(tempfile.mkdtemp()) / "service.toml"
            lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
            config.write_text("\n".join([*lines, f'http = "127.0.0.1:{self.port}"', f'model = "{MODEL}"']))
            command = [sys.executable, "-m", "tests.foreign.bridged_service", str(config)]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
            for _ in range(6000):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                        break
                except OSError:
                    assert self.process.poll() is None, f"the service has ended: {config.read_text()}"
                    time.sleep(0.1)
        return self.port

    def stop(self) -> None:
        """Ends the service."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


SERVICE = Service()
# A window that every model has: smaller ones are set, larger ones are the model's.
LEAST_WINDOW = 512


def bridge_llama(utils: types.ModuleType) -> None:
    """Has llama.cpp's tests start this service."""

    def start(server: Any, timeout_seconds: int = 60) -> None:
        slots, options = server.n_slots or 1, {}
        if server.n_ctx and server.n_ctx // slots < LEAST_WINDOW:
            options["context_tokens"] = server.n_ctx // slots
        template = server.chat_template_file and Path(server.chat_template_file).resolve()
        options |= {"chat_template": str(template)} if template else DEFAULT
        server.server_port = SERVICE.require(**options)
        server.ready = True

    own_url = utils.ServerProcess.make_url

    def make_url(server: Any, path: str, host: str | None = None) -> str:
        bare = re.match(r"/(chat/completions|responses|completions|embeddings|models)\b", path)
        return own_url(server, f"/v1{path}" if bare else path, host)

    utils.ServerProcess.start, utils.ServerProcess.make_url = start, make_url
    utils.ServerProcess.stop = lambda server: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)


class RemoteOpenAIServer:
    """Stands for vLLM's helper of this name."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, args: Any = (), **others: Any) -> None:
        self.port = SERVICE.require(**DEFAULT)
        self.host, self.url_root = "127.0.0.1", f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url_root}/v1", api_key="none", max_retries=0, **options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url_root}/v1", api_key="none", max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_root, api_key="none", max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key="none", max_retries=0, **options)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of vLLM's name, whose contents are mocks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "vllm" or name.startswith("vllm.") or name == "wget":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Stubs())
helpers = types.ModuleType("tests.utils")
helpers.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
helpers.__getattr__ = lambda name: mock.MagicMock(name=name)  # type: ignore[method-assign]
sys.modules["tests.utils"] = helpers
if Path("utils.py").exists():
    sys.path.insert(0, str(Path.cwd()))
    import utils  # type: ignore[import-not-found]

    bridge_llama(utils)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the service before the tests, whose time is limited: the first start compiles."""
    del session
    SERVICE.require(**DEFAULT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips by name, each with its reason."""
    for item in items:
        source = inspect.getsource(getattr(item, "function", lambda: None))
        reason = next((why for part, why in SKIPPED.items() if part in item.nodeid), None)
        if reason is None and "llama" not in str(ROOT_OF_TESTS) and not SERVERS & {*item.fixturenames}:
            reason = "of vLLM's own classes"
        if reason is None and OWN_PATHS.search(source) and "/v1/" not in source:
            reason = "llama.cpp's own API"
        if reason is None and (flag := OWN_FLAGS.search(source)):
            reason = f"needs llama-server's option {flag[1]}"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def service() -> Iterator[None]:
    """Ends the service after all tests."""
    yield
    SERVICE.stop()
