"""The service under clients of all kinds for some time: no stuck call, no leak, the same answers at the end.

JAXLLM_SOAK_MINUTES sets how long; 45 seconds without it.
"""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from jaxllm.serving.server.identity import add_key
from tests.serving.server.daemons import MAIN, Process
from tests.serving.server.hard_clients import Clients

MINUTES = float(os.environ.get("JAXLLM_SOAK_MINUTES", "0.75"))
# Of the time, before what the process has is first looked at: its caches are full then.
WARM_UP = 0.4
QUIET_S = 60.0
OPTIONS = """
http = "127.0.0.1:0"
context_tokens = 256
levels = [50, 100]
batch_rows = [2, 4]
prefix_memory = "4MB"
contexts = "contexts"
context_budget = "8MB"

[limits]
contexts = 32

[scheduler]
queued = 12
app_queued = 8
running = 6
background_running = 3
"""
# While there is a file that names an error, whatever touches the folder of contexts fails by it.
FAULTS = (
    """
import errno, os, threading, time
from tests.faults import FailingDevice
device = FailingDevice(os.environ["CONTEXTS"], at=None).__enter__()
def watch():
    while True:
        try:
            with open(os.environ["STORE_FAULT"]) as file:
                device.fail(getattr(errno, file.read(), errno.EIO))
        except FileNotFoundError:
            device.mend()
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
"""
    + MAIN
)
# What allocators keep of a peak, besides the share of a leak.
ROUNDING_BYTES = 12 << 20
MOST_GROWTH = 0.02


class Service:
    """A service, and what its process has."""

    def __init__(self, folder: Path) -> None:
        self.keys = {app: add_key(folder / "keys.json", app)[0] for app in ("mail", "chat", "notes")}
        self.operator, _ = add_key(folder / "keys.json", "watch", operator=True)
        config = folder / "service.toml"
        config.write_text(OPTIONS)
        self.store_fault, contexts = folder / "store_fault", folder / "contexts"
        self.process = Process(
            folder, "--config", config, script=FAULTS,
            environment={"CONTEXTS": str(contexts), "STORE_FAULT": str(self.store_fault)},
        )  # fmt: skip
        self.url = self.process.ready()

    def calls(self) -> dict[str, float]:
        """Numbers of calls over all apps: accepted, ended, cancelled, failed, judged, met."""
        headers = {"Authorization": f"Bearer {self.operator}"}
        told = httpx.get(self.url + "/metrics", headers=headers, timeout=60)
        assert told.status_code == 200, told.text
        text = told.text

        def total(name: str, labels: str = "") -> float:
            found = re.findall(
                rf"^jaxllm_{name}_total\{{[^}}]*{labels}[^}}]*\}} ([\d.e+]+)$", text, re.MULTILINE
            )
            return sum(map(float, found))

        counts = {each: total(f"calls_{each}") for each in ("accepted", "ended", "cancelled", "failed")}
        return counts | {"judged": total("objectives"), "met": total("objectives", 'met="true"')}

    def quiet(self) -> tuple[dict[str, float], int, int, int]:
        """Waits until nothing runs: numbers of calls, resident bytes, open files and threads."""
        late_s = time.monotonic() + QUIET_S
        while True:
            found = self.calls()
            if found["accepted"] == found["ended"] + found["cancelled"] + found["failed"]:
                break
            assert time.monotonic() < late_s, f"calls that do not end: {found}"
            time.sleep(0.2)
        process = Path(f"/proc/{self.process.process.pid}")
        # Connections that clients have left are closed in a moment.
        time.sleep(1.0)
        status = (process / "status").read_text()
        resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # pyright: ignore
        return found, resident, len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()])


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_soak(tmp_path):
    service = Service(tmp_path)
    try:
        clients = Clients(service.url, service.keys, service.store_fault)
        asyncio.run(clients.run(60 * MINUTES * WARM_UP))
        _, resident, files, threads = service.quiet()
        asyncio.run(clients.run(60 * MINUTES * (1 - WARM_UP)))
        found, resident_after, files_after, threads_after = service.quiet()
        print(dict(clients.seen), found, f"{resident / 1e6:.1f} -> {resident_after / 1e6:.1f} MB")
        print(f"objectives met: {found['met'] / max(1, found['judged']):.0%}")
        assert not clients.strange, clients.strange[:5]
        wanted = {"answered", "left", "refused 429", "read slowly", "never read", "nonsense", "turn"}
        assert wanted | {"storage failed"} <= {*clients.seen}
        # A failing device is told by one of these, whatever the turn was at.
        assert {"context 500", "context 503", "context 507"} & {*clients.seen}
        # Only turns whose storage failed.
        assert found["failed"] <= sum(number for name, number in clients.seen.items() if "context " in name)
        assert found["judged"] > 0
        # Whoever an answer was decoded with, it is the same.
        assert clients.texts
        assert all(len(texts) == 1 for texts in clients.texts.values()), clients.texts
        assert resident_after <= resident * (1 + MOST_GROWTH) + ROUNDING_BYTES
        assert files_after <= files + 2
        assert threads_after <= threads
        assert httpx.get(service.url + "/health", timeout=60).status_code == 200
        with httpx.Client(base_url=service.url, timeout=60) as client:
            client.headers["Authorization"] = f"Bearer {service.keys['mail']}"
            name = client.post("/v1/contexts", json={}).json()["id"]
            said = client.post(f"/v1/contexts/{name}/generate", json={"prompt": "The cat", "max_tokens": 4})
            assert said.status_code == 200, said.text
        assert "Traceback" not in service.process.text()
        service.process.signal(signal.SIGTERM)
        assert service.process.ended() == 0, service.process.text()
    finally:
        service.process.kill()
