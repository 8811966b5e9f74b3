"""`jaxllm contexts`: what is there, what is damaged, and that nothing is made by looking."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxllm.serving.contexts.layout import CATALOG
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.contexts.store import ContextStore
from tests.cli.outcome import Run, answer, failed, succeeded

ORIGIN = Origin(
    model="m", level=70, adapter="", codec="kivi", chunk_tokens=2, dtype="float16", heads=(1,), head_width=8
)


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Record]:
    """A store with a context of two chunks, and an empty one."""
    with ContextStore(tmp_path / "store") as store:
        store.create("calendar", ORIGIN, pinned=True)
        filled = {"tokens": (1, 2, 3, 4, 5), "bits": (8, 4), "mass": (0.5, 0.5), "seen": (1.0, 1.0)}
        record = dataclasses.replace(store.create("mail", ORIGIN), **filled)
        sizes = {bits: of[0] for bits, of in ORIGIN.layer_bytes.items()}
        blobs = {0: (8, [np.arange(sizes[8], dtype=np.uint8)]), 1: (4, [np.arange(sizes[4], dtype=np.uint8)])}
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
    # A bit of the first chunk.
    path = folder / "app-mail" / record.name / record.files[0]
    raw = bytearray(path.read_bytes())
    raw[raw.find(bytes(range(32)))] ^= 1
    path.write_bytes(raw)
    outcome = run("contexts", "verify", folder, "--json")
    assert outcome.code == 1
    assert f"`jaxllm contexts repair {folder}` sets them aside" in outcome.err
    damaged = {
        "app": "mail", "name": record.name, "chunks": [0], "reason": "", "lost": False, "proved": True,
        "aside": "",
    }  # fmt: skip
    assert json.loads(outcome.out) == {"damaged": [damaged], "repaired": False, "set_aside": []}
    shown = succeeded(run("contexts", "repair", folder))
    assert shown == (
        f"{record.name}  mail  chunks 0 are damaged, and computed again\n1 damaged contexts, 1 repaired\n"
    )
    assert answer(run("contexts", "verify", folder, "--json"))["damaged"] == []
    assert answer(run("contexts", "list", folder, "--json"))["contexts"][1]["lost"] == 1


def test_what_cannot_be_read_is_listed_and_set_aside_before_it_is_deleted(
    run: Run, kept: tuple[Path, Record]
) -> None:
    folder, record = kept
    # A byte of its record.
    raw = (folder / CATALOG).read_bytes()
    at = raw.index(f'"name":"{record.name}"'.encode())
    (folder / CATALOG).write_bytes(raw[:at] + b"'" + raw[at + 1 :])
    outcome = run("contexts", "list", folder)
    assert (outcome.code, record.name in outcome.out, "is corrupt" in outcome.out) == (1, True, True)
    assert run("contexts", "list", folder, "--app", "calendar").code == 0
    held = folder / "app-mail" / record.name / record.files[0]
    chunks = held.read_bytes()
    shown = succeeded(run("contexts", "repair", folder))
    assert "; set aside as quarantine/app-mail/" in shown
    assert "1 set aside in" in shown
    (moved,) = (folder / "quarantine" / "app-mail").glob(f"{record.name}-*")
    assert (moved / record.files[0]).read_bytes() == chunks
    assert not held.exists()
    listed = answer(run("contexts", "list", folder, "--json"))
    assert (listed["damaged"], [each["app"] for each in listed["contexts"]]) == ([], ["calendar"])
    # Files of others are not purged.
    theirs, ours = moved.with_name("mine"), shutil.copytree(moved, folder.with_name("ours"))
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    outcome, left = run("contexts", "purge", folder, "--json"), str(theirs.relative_to(folder))
    assert outcome.code == 1
    assert json.loads(outcome.out) == {"deleted": [str(moved.relative_to(folder))], "left": [left]}
    assert not moved.exists()
    assert (theirs / "notes.txt").read_text() == "mine"
    shutil.rmtree(theirs)
    shutil.move(ours, moved)
    assert answer(run("contexts", "purge", folder, "--json"))["left"] == []
    assert not (folder / "quarantine").exists()


def test_what_is_no_store_stays_so(run: Run, tmp_path: Path) -> None:
    for command in ("list", "verify", "repair", "purge"):
        failed(run("contexts", command, tmp_path / "nothing"), "is not a folder of contexts")
    assert not (tmp_path / "nothing").exists()


def test_encrypted_contexts_take_their_keys(run: Run, tmp_path: Path) -> None:
    folder, keys = tmp_path / "store", tmp_path / "keys"
    with ContextStore(folder, keys=keys) as store:
        record = store.create("mail", ORIGIN)
    assert "is encrypted" in run("contexts", "verify", folder).out
    succeeded(run("contexts", "verify", folder, "--keys", keys))
    assert record.name in succeeded(run("contexts", "list", folder, "--keys", keys))
