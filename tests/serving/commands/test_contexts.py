"""`jaxllm contexts`: what is there, what is damaged, and that nothing is made by looking."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from serving.contexts.record import Origin, Record
from serving.contexts.store import ContextStore
from tests.serving.commands.outcome import Run, answer, failed, succeeded

ORIGIN = Origin(model="m", level=70, adapter="", codec="kivi", chunk_tokens=2, dtype="float16")


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Record]:
    """A store with a context of two chunks, and an empty one."""
    with ContextStore(tmp_path / "store") as store:
        store.create("calendar", ORIGIN, pinned=True)
        record = dataclasses.replace(
            store.create("mail", ORIGIN),
            tokens=(1, 2, 3, 4, 5),
            bits=(8, 4),
            mass=(0.5, 0.5),
            seen=(1.0, 1.0),
        )
        blobs = {0: (8, [np.arange(64, dtype=np.uint8)]), 1: (4, [np.arange(32, dtype=np.uint8)])}
        record = store.commit(record, blobs)
    return tmp_path / "store", record


def test_list(run: Run, kept: tuple[Path, Record]) -> None:
    folder, record = kept
    facts = answer(run("contexts", "list", folder, "--json"))
    assert [each["app"] for each in facts["contexts"]] == ["calendar", "mail"]
    assert facts["contexts"][1] == {
        "app": "mail", "name": record.name, "level": 70, "codec": "kivi", "tokens": 5, "chunks": 2, "lost": 0,
        "pinned": False,
    }  # fmt: skip
    lines = succeeded(run("contexts", "list", folder, "--app", "mail")).splitlines()
    assert lines[0] == f"{record.name}  mail  5 tokens at level 70, 2 chunks by kivi"
    assert lines[1].startswith("1 contexts, ")


def test_verify(run: Run, kept: tuple[Path, Record]) -> None:
    folder, record = kept
    assert succeeded(run("contexts", "verify", folder)) == "0 damaged contexts\n"
    path = folder / "app-mail" / record.name / record.files[0]
    raw = bytearray(path.read_bytes())
    raw[raw.find(bytes(range(64)))] ^= 1
    path.write_bytes(raw)
    outcome = run("contexts", "verify", folder, "--json")
    assert outcome.code == 1
    assert "run this with --repair" in outcome.err
    damaged = [{"app": "mail", "name": record.name, "chunks": [0], "reason": ""}]
    assert json.loads(outcome.out) == {"damaged": damaged, "repaired": False}
    shown = succeeded(run("contexts", "verify", folder, "--repair"))
    assert shown == f"{record.name}  mail  chunks 0 are corrupt\n1 damaged contexts, repaired\n"
    assert answer(run("contexts", "verify", folder, "--json")) == {"damaged": [], "repaired": False}
    assert answer(run("contexts", "list", folder, "--json"))["contexts"][1]["lost"] == 1


@pytest.mark.parametrize("command", ["list", "verify"])
def test_what_is_no_store_stays_so(run: Run, tmp_path: Path, command: str) -> None:
    failed(run("contexts", command, tmp_path / "nothing"), "is no folder of contexts")
    assert not (tmp_path / "nothing").exists()
