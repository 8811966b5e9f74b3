"""Contexts of the service as a process: kept over a restart, encrypted, and another process's no more."""

import contextlib
import signal

import pytest

from jaxllm.client import Client
from jaxllm.serving.contexts.store import ContextStore
from tests.serving.server.daemons import Process
from tests.tiny import write_tiny_bundle


@pytest.mark.slow
def test_contexts_outlive_the_service(tmp_path):
    model, config = write_tiny_bundle(tmp_path / "tiny.jaxllm"), tmp_path / "service.toml"
    config.write_text(
        'context_tokens = 128\nbatch_rows = []\ncontext_keys = "keys"\ncontext_budget = "1MB"\n'
    )
    started, clients = [], contextlib.ExitStack()

    def begun(place):
        folder = tmp_path / place
        folder.mkdir()
        process = Process(
            folder, "--model", model, "--config", config, "--socket", folder / "s",
            "--contexts", tmp_path / "contexts", "--attend-coded",
        )  # fmt: skip
        started.append(process)
        return process, clients.enter_context(Client(socket=folder / "s"))

    try:
        first, client = begun("1")
        first.until(lambda: "ready:" in first.text())
        context = client.new_context()
        told = context.generate("my secret is swordfish", max_tokens=8).result().facts
        second, _ = begun("2")
        assert second.ended() == 1
        assert "contexts is in use by another process" in second.text()
        first.signal(signal.SIGTERM)
        assert first.ended() == 0, first.text()
        with ContextStore(tmp_path / "contexts") as store:
            assert store.records() == []
            assert "is encrypted" in store.damage()[0].reason
        third, client = begun("3")
        third.until(lambda: "ready:" in third.text())
        config.write_text(config.read_text().replace("1MB", "2MB"))
        third.signal(signal.SIGHUP)
        third.until(lambda: "contexts may take 2,000,000 bytes" in third.text())
        (there,) = client.contexts()
        assert (there.name, there.facts["tokens"]) == (context.name, told["context_tokens"])
        assert there.generate("and?", max_tokens=4).result().facts["reused_tokens"] >= 16
        there.delete()
        assert client.contexts() == []
    finally:
        clients.close()
        for each in started:
            each.kill()
