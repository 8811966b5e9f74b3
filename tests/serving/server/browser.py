"""Drives a headless Chromium over its debugging pipe: pages and their console."""

import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-default-apps", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 60.0


class Browser:
    """One page. Chromium reads commands from its file descriptor 3 and writes answers to 4."""

    def __init__(self, folder):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        # Descriptors move to 3 and 4 in a shell, because they may be any here.
        script = f'exec 3<&{commands} 4>&{answers} && exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._rest, self._number, self._session = b"", 0, None
        self.problems = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self):
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(20)

    def view(self, width, height, *, dark=False):
        """Sets the size of the page in pixels, and what it prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        self._call("Page.navigate", url=url)

    def value(self, script):
        """The value of an expression in the page."""
        got = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, script, seconds=_SECONDS):
        """Waits until an expression is true in the page."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, f"never true: {script}; {self.problems}"
            time.sleep(0.05)

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._message()
            if got.get("id") == self._number:
                assert "error" not in got, (method, got["error"])
                return got["result"]
            self._note(got)

    def _message(self):
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], _SECONDS)[0], "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def _note(self, event):
        """Keeps errors and warnings of the page."""
        kind, parameters = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif kind == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(str([each.get("value") for each in parameters["args"]]))
        elif kind == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            entry = parameters["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
