"""Budgets of rooms and campaigns name what there is, and what exceeds a budget by half is named."""

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.budgets import (
    BUDGETS_FILE,
    LOADING,
    ROOT,
    is_campaign,
    over_budget,
    read_campaigns,
    room_of_test,
    table,
)

BUDGETS = {"kv": 10.0, "serving": 20.0, "serving/server": 5.0}


def test_a_test_belongs_to_the_deepest_room_with_a_budget():
    rooms = {
        "tests/kv/test_cache.py::test_a": "kv",
        "tests/serving/server/api/test_chat.py::test_a[x/y]": "serving/server",
        "tests/serving/test_engine.py::test_a": "serving",
        "tests/new/deep/test_a.py::test_a": "new",
        "tests/test_config.py::test_a": "(top)",
    }
    assert {node: room_of_test(node, BUDGETS) for node in rooms} == rooms


def test_a_room_may_exceed_its_budget_by_half():
    assert over_budget({"kv": 15.0, "serving": 1.0}, BUDGETS) == []
    (late, unknown) = over_budget({"kv": 15.1, "new": 0.1}, BUDGETS)
    assert late == "kv: 15 s of CPU, budget 10 s"
    assert unknown == "new: 0 s of CPU, no budget"
    assert table({"kv": 5.0}, {"kv": 3}, BUDGETS)[1].split() == ["kv", "3", "5.0", "10", "50%"]


def test_only_a_star_of_a_pattern_is_special():
    assert is_campaign("tests/a.py::test_b[c-1]", ["tests/a.py::test_b[c-*]"])
    assert not is_campaign("tests/a.py::test_b[d-1]", ["tests/a.py::test_b[c-*]"])
    assert not is_campaign("tests/a.py::test_bc", ["tests/a.py::test_b"])


def test_budgets_and_campaigns_name_what_there_is():
    folders = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("*/")}
    assert set(json.loads(BUDGETS_FILE.read_text(encoding="utf-8"))) <= folders | {"(top)", LOADING}
    for pattern, instead in read_campaigns().items():
        for node in (pattern, instead):
            file, _, test = node.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            tests = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
            assert test.partition("[")[0] in tests, node
        assert not is_campaign(instead, read_campaigns()), f"{instead} is a campaign itself"


_BUSY = """
import time

def test_busy():
    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
"""


def _run(folder: Path, enforced: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys, pathlib, pytest, tests.budgets as budgets\n"
        "budgets.BUDGETS_FILE = pathlib.Path('budgets.json')\n"
        "budgets.PRINTED_FROM_S = 0.0\n"
        "sys.exit(pytest.main(['-q', '-p', 'tests.budgets', '-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "JAXLLM_BUDGETS": enforced},
        capture_output=True,
        text=True,
    )


def test_a_run_over_its_budget_fails_where_budgets_are_enforced(tmp_path):
    (tmp_path / "tests" / "kv").mkdir(parents=True)
    (tmp_path / "tests" / "kv" / "test_busy.py").write_text(_BUSY)
    (tmp_path / "budgets.json").write_text(json.dumps({"kv": 0.1, LOADING: 600}))
    told = _run(tmp_path, "0")
    assert told.returncode == 0, told.stdout + told.stderr
    assert "over budget: kv" in told.stdout
    failed = _run(tmp_path, "1", "-n", "1")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "over budget: kv" in failed.stdout
    (tmp_path / "budgets.json").write_text(json.dumps({"kv": 60, LOADING: 600}))
    assert _run(tmp_path, "1").returncode == 0
