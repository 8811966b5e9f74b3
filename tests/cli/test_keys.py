"""`jaxllm keys`: keys are printed once, listed without themselves, and removed."""

from pathlib import Path

import pytest

from jaxllm.serving.server.identity import KeyFile
from tests.cli.outcome import Run, answer, failed, succeeded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config" / "keys.json"


def app_of(keys: KeyFile, key: str) -> str | None:
    found = keys.find(key)
    return None if found is None else found.app


def test_the_command_makes_lists_and_removes(run: Run, path: Path) -> None:
    made = answer(run("keys", "add", "mail", "--file", path, "--json"))
    assert app_of(KeyFile(path), made["key"]) == "mail"
    key = succeeded(run("keys", "add", "calendar", "--file", path)).strip()
    assert app_of(KeyFile(path), key) == "calendar"
    listed = succeeded(run("keys", "list", "--file", path))
    assert f"{made['id']}  mail  made " in listed
    assert "2 keys" in listed
    assert key not in listed
    assert [each["app"] for each in answer(run("keys", "list", "--file", path, "--json"))["keys"]] == [
        "mail", "calendar",
    ]  # fmt: skip
    assert answer(run("keys", "remove", made["id"], "--file", path, "--json")) == {
        "removed": [made["id"]], "left": 1,
    }  # fmt: skip
    assert "1 removed, 0 left" in succeeded(run("keys", "remove", "calendar", "--file", path))
    failed(run("keys", "remove", "calendar", "--file", path), "no key 'calendar'")
    failed(run("keys", "add", "a b", "--file", path), "an app's name has")
    made = answer(run("keys", "add", "admin", "--operator", "--file", path, "--json"))
    assert made["operator"] is True
    assert ", operator" in succeeded(run("keys", "list", "--file", path))
    assert answer(run("keys", "list", "--file", path, "--json"))["keys"][-1]["operator"] is True
