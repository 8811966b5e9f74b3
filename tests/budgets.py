"""Marks campaigns, and compares the CPU time of the tests of each room with its budget: a pytest plugin.

`campaigns.json` has tests that prove for more cases what the daily suite proves: id of the daily test that
catches the same kind of fault -> patterns of ids, with `*` for anything; `[case]` is another case of the same
test, `::test` one of the same file. They get the mark `campaign`, as do cases that are marked in their files:
`make test` leaves them out, `make test-all` runs them, too.

`budgets.json` has the seconds of CPU that each room may use on a quiet machine of two cores, by the path
below `tests/`; the longest path that matches a test names its room. The table is printed after every run of
more than a minute. With `JAXLLM_BUDGETS=1`, as in CI, the run fails where a room exceeds its budget by half,
or has none.
"""

import json
import os
import re
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGETS_FILE = Path(__file__).with_name("budgets.json")
CAMPAIGNS_FILE = Path(__file__).with_name("campaigns.json")
TOLERANCE = 1.5
LOADING = "(collection)"
PRINTED_FROM_S = 60.0


def room_of_test(node_id: str, budgets: Mapping[str, float]) -> str:
    """The room of a test: the longest path in `budgets` that leads to its file, else its top folder."""
    folders = node_id.partition("::")[0].removeprefix("tests/").split("/")[:-1]
    paths = ["/".join(folders[:depth]) for depth in range(len(folders), 0, -1)]
    top = paths[-1] if paths else "(top)"
    return next((path for path in paths if path in budgets), top)


def read_campaigns() -> dict[str, str]:
    """Pattern of ids -> the test of the daily suite that catches the same kind of fault."""
    found: dict[str, str] = {}
    for daily, patterns in json.loads(CAMPAIGNS_FILE.read_text(encoding="utf-8")).items():
        before = {"[": daily.partition("[")[0], ":": daily.partition("::")[0]}
        found |= {before.get(pattern[0], "") + pattern: daily for pattern in patterns}
    return found


def is_campaign(node_id: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a test's id; in patterns only `*` is special."""
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), node_id) for pattern in patterns)


def over_budget(spent: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """Describes every room that exceeds its budget by more than half, or has none."""
    over = {room: seconds for room, seconds in spent.items() if seconds > TOLERANCE * budgets.get(room, 0.0)}
    return [
        f"{room}: {seconds:.0f} s of CPU, budget {budgets[room]:g} s"
        if room in budgets
        else f"{room}: {seconds:.0f} s of CPU, no budget"
        for room, seconds in sorted(over.items())
    ]


def table(spent: Mapping[str, float], tests: Mapping[str, int], budgets: Mapping[str, float]) -> list[str]:
    """Rows of text: room, number of tests, seconds of CPU, budget, and the share of it that was used."""
    rows = [f"{'room':26} {'tests':>6} {'CPU s':>8} {'budget':>8} {'used':>6}"]
    for room, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        budget = budgets.get(room)
        limit, used = (f"{budget:g}", f"{seconds / budget:.0%}") if budget else ("none", "")
        rows.append(f"{room:26} {tests.get(room, 0):6} {seconds:8.1f} {limit:>8} {used:>6}")
    rows.append(f"{'all':26} {sum(tests.values()):6} {sum(spent.values()):8.1f} {sum(budgets.values()):8g}")
    return rows


def cpu_s() -> float:
    """The CPU time of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Budgets:
    """Measures in whatever process runs the tests; adds up in the one that reports them."""

    def __init__(self, budgets: Mapping[str, float]) -> None:
        self._budgets = budgets
        self._measured_s = 0.0
        self._spent: dict[str, float] = defaultdict(float)
        self._tests: Counter[str] = Counter()
        self._began = time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Files have few patterns, and the suite has thousands of tests.
        by_file: dict[str, list[str]] = {}
        for pattern in read_campaigns():
            by_file.setdefault(pattern.partition("::")[0], []).append(pattern)
        for item in items:
            if is_campaign(item.nodeid, by_file.get(item.nodeid.partition("::")[0], ())):
                item.add_marker("campaign")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = cpu_s()
        # The first report of a process has what was spent before: imports and collection.
        report.cpu_s, report.loading_s = (now - self._measured_s, 0.0) if self._measured_s else (0.0, now)
        self._measured_s = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        room = room_of_test(report.nodeid, self._budgets)
        self._spent[room] += getattr(report, "cpu_s", 0.0)
        self._tests[room] += report.when == "call"
        if loading_s := getattr(report, "loading_s", 0.0):
            self._spent[LOADING] += loading_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if sum(self._spent.values()) < PRINTED_FROM_S:
            return
        terminalreporter.section(f"time of the rooms, {time.monotonic() - self._began:.0f} s in all")
        for row in table(self._spent, self._tests, self._budgets):
            terminalreporter.write_line(row)
        for fault in over_budget(self._spent, self._budgets):
            terminalreporter.write_line(f"over budget: {fault}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        enforced = os.environ.get("JAXLLM_BUDGETS") == "1" and "PYTEST_XDIST_WORKER" not in os.environ
        if enforced and over_budget(self._spent, self._budgets) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "campaign: proves once more, for more cases, what the suite proves")
    budgets = json.loads(BUDGETS_FILE.read_text(encoding="utf-8"))
    config.pluginmanager.register(Budgets(budgets), "jaxllm-budgets")
