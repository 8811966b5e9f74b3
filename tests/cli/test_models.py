"""Tests models of the hub by name, against a hub on the loopback, with huggingface_hub as it is."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download

from jaxllm.cli import models
from tests.cli.outcome import CFG, PARAMS, Run, answer, failed, succeeded
from tests.serving.sources.fake_hub import COMMIT, FakeHub
from tests.tiny import write_tiny_folder

TINY, FILES = "hf:owner/tiny", "owner/tiny"
GGUFS = {"a-Q4_0.gguf": b"GGUF four", "a-Q8_0.gguf": b"GGUF eight", "mmproj-a.gguf": b"GGUF", "run.py": b""}
CODE = {"modeling_tiny.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04", "onnx/model.onnx": b""}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache of this test."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a tiny model, and files that no model is read from."""
    hub = FakeHub()
    folder = write_tiny_folder(tmp_path / "tiny", cfg=CFG, params=PARAMS)
    hub.files[FILES] = {each.name: each.read_bytes() for each in folder.iterdir()} | CODE
    hub.files["owner/ggufs"] = dict(GGUFS)
    hub.facts[FILES] = {"cardData": {"license": "mit"}, "tags": ["license:mit"]}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    template = f"{hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield hub
    hub.close()


def listed(run: Run) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in answer(run("models", "--json"))["models"]}


def test_a_model_of_the_hub_is_opened_by_its_name_and_offline_afterwards(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ask = ("generate", "-m", TINY, "-p", "a", "-n", "2", "--ignore-eos", "--temperature", "0", "--json")
    first = answer(run(*ask))
    asked = {name for name, *_ in hub.sent}
    assert asked == {name for name in hub.files[FILES] if name not in CODE}
    # The token goes to the hub alone.
    assert {name.endswith(".safetensors") for name, *_, token in hub.sent if token is None} == {True}
    hub.close()
    assert answer(run(*ask))["text"] == first["text"]
    found = listed(run)[TINY]
    assert (found["from"], found["format"], found["licence"]) == ("hub", "safetensors", "mit")
    assert found["bytes"] == sum(len(hub.files[FILES][name]) for name in asked)
    facts = answer(run("info", TINY, "--json"))
    assert facts["model"] == "tiny"


def test_a_killed_download_resumes_where_it_ended(run: Run, hub: FakeHub, home: Path, tmp_path: Path) -> None:
    data = os.urandom(16 << 20)
    hub.files["owner/big"] = {"big.gguf": data}
    wait = threading.Event()
    hub.gate = lambda name, at: at < 13 << 20 or wait.wait(60)
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(home),
        "HF_HUB_OFFLINE": "0",
    }
    command = [sys.executable, "-m", "jaxllm.cli.main", "pull", "hf:owner/big"]
    with subprocess.Popen(command, env=environment) as process:
        blobs = home / "models--owner--big" / "blobs"
        while not any(each.stat().st_size for each in blobs.glob("*.incomplete")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    wait.set()
    (partial,) = blobs.iterdir()
    kept = partial.stat().st_size
    assert 0 < kept < len(data)
    hub.sent.clear()
    path = Path(succeeded(run("pull", "hf:owner/big")).strip())
    assert path.read_bytes() == data
    assert [each for each in hub.sent if each[1]] == [("big.gguf", kept, len(data) - kept, None)]
    assert not list(blobs.glob("*.incomplete"))


def test_a_named_file_is_downloaded_alone_and_several_are_listed(run: Run, hub: FakeHub, home: Path) -> None:
    path = Path(succeeded(run("pull", "hf:owner/ggufs:a-Q8_0.gguf")).strip())
    assert path.read_bytes() == GGUFS["a-Q8_0.gguf"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    failed(run("pull", "hf:owner/ggufs"), "2 GGUF files", "hf:owner/ggufs:a-Q4_0.gguf", "a-Q8_0.gguf")
    failed(run("pull", "hf:owner/ggufs:b.gguf"), "no such file", "a-Q4_0.gguf, a-Q8_0.gguf")
    hub.files["owner/old"] = dict(CODE)
    failed(run("pull", "hf:owner/old"), "only as pickles (pytorch_model.bin)", "can run code")
    hub.files["owner/odd"] = {"../../evil.gguf": b"GGUF", "/etc/evil.gguf": b"GGUF", "README.md": b""}
    failed(run("pull", "hf:owner/odd"), "no GGUF file")
    assert not list(home.parent.rglob("evil*"))


@pytest.mark.parametrize(
    "name",
    ["", "tiny", "../tiny", "owner/..", "owner/a--b", "owner/tiny@", "owner/tiny:a/../b.gguf",
     "owner/tiny:m.bin", "owner/tiny:/m.gguf", "owner/tiny?x", "owner/tiny@a b\n"],
)  # fmt: skip
def test_names_that_are_none_are_refused_before_anything_is_asked(run: Run, name: str, hub: FakeHub) -> None:
    hub.fault = lambda path: pytest.fail(path)
    failed(run("generate", "-m", f"hf:{name}", "-p", "a"), "names")


@pytest.mark.parametrize(
    ("status", "headers", "parts"),
    [
        (401, {}, ("no such model for you", "HF_TOKEN", "(HTTP 401)")),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            ("accept its terms at http://127.0.0.1", "owner/tiny", "HF_TOKEN"),
        ),
        (403, {}, ("refuses it to you", "HF_TOKEN")),
        (404, {"X-Error-Code": "RepoNotFound"}, ("no such model", "check its name")),
        (404, {"X-Error-Code": "RevisionNotFound"}, ("no revision 'main'",)),
        (429, {"Retry-After": "17"}, ("too many requests", "in 17 s", "(HTTP 429)")),
        (502, {}, ("try again later", "(HTTP 502)")),
        (200, {}, ("does not answer as a hub does", "check HF_ENDPOINT")),
    ],
)
def test_a_hub_that_refuses_is_explained(
    run: Run, hub: FakeHub, status: int, headers: dict[str, str], parts: tuple[str, ...]
) -> None:
    hub.fault = lambda path: (status, headers) if "/api/" in path else None
    failed(run("pull", TINY), TINY, *parts)
    if status == 403:
        hub.fault = lambda path: (status, headers) if "/resolve/" in path else None
        failed(run("pull", TINY), TINY, *parts)


def test_no_hub_no_package_and_no_network_are_explained(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    failed(run("pull", TINY), hub.endpoint, "cannot be reached", "check the network and HF_ENDPOINT")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    failed(run("pull", TINY), "HF_HUB_OFFLINE is set")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    failed(run("pull", TINY), "run `pip install 'jaxllm[hub]'`")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_arrives_damaged_is_not_kept(run: Run, hub: FakeHub, home: Path, name: str) -> None:
    data = hub.files[FILES][name]
    hub.altered = {name: data[:9] + bytes([data[9] ^ 1]) + data[10:]}
    failed(run("pull", TINY), name, "another checksum", "try again")
    hub.altered = {name: data[: len(data) // 2]}
    failed(run("pull", TINY), "try again")
    hub.altered = {}
    folder = Path(succeeded(run("pull", TINY)).strip())
    assert (folder / name).read_bytes() == data


def test_a_full_disk_is_seen_before_a_download_and_in_it(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        failed(run("pull", TINY), "the disk of", "is full", "make room, or set HF_HOME")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    failed(run("pull", TINY), "the disk of", "is full", "make room, or set HF_HOME")


def test_a_licence_that_asks_is_shown_and_consent_remembered(
    run: Run, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {"license": "gemma", "license_link": "https://terms.example"}
    hub.facts[FILES] = {"cardData": card, "tags": []}
    failed(run("generate", "-m", TINY, "-p", "a"), "gemma", "https://terms.example", "--accept-license")
    assert not hub.sent
    with monkeypatch.context() as patch:
        asked: list[str] = []
        patch.setattr(models, "_is_terminal", lambda: True)
        patch.setattr(models.click, "confirm", lambda text, **_: asked.append(text))
        refused = run("pull", TINY)
        assert refused.code == 1
        assert "gemma, at https://terms.example" in refused.err
        assert "was not accepted; nothing was downloaded" in refused.err
        assert asked
    succeeded(run("pull", TINY, "--accept-license"))
    succeeded(run("rm", TINY))
    succeeded(run("pull", TINY))
    # A gated model asks, whatever its licence.
    hub.facts["owner/ggufs"] = {"gated": "manual"}
    failed(run("pull", "hf:owner/ggufs:a-Q4_0.gguf"), "asks for consent")


def test_only_what_was_pulled_is_removed(run: Run, hub: FakeHub, home: Path) -> None:
    other = Path(hf_hub_download(FILES, "config.json", revision=COMMIT))
    failed(run("rm", TINY), "was not pulled by jaxllm")
    succeeded(run("pull", TINY))
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        succeeded(run("pull", f"hf:owner/ggufs:{name}"))
    assert listed(run).keys() >= {TINY, "hf:owner/ggufs:a-Q4_0.gguf", "hf:owner/ggufs:a-Q8_0.gguf"}
    freed = answer(run("rm", TINY, "--json"))["freed_bytes"]
    kept = hub.files[FILES]["config.json"]
    assert freed == sum(map(len, hub.files[FILES].values())) - len(kept) - sum(map(len, CODE.values()))
    assert other.read_bytes() == kept
    assert [each.name for each in other.parent.iterdir()] == ["config.json"]
    succeeded(run("rm", "hf:owner/ggufs:a-Q4_0.gguf"))
    assert [each.name for each in home.glob("models--owner--ggufs/snapshots/*/*")] == ["a-Q8_0.gguf"]
    succeeded(run("rm", "hf:owner/ggufs"))
    assert not (home / "models--owner--ggufs").exists()
    assert other.read_bytes() == kept
    assert not listed(run).keys() & {TINY, "hf:owner/ggufs:a-Q8_0.gguf"}


def test_models_of_other_programs_are_used_offline_and_verified_at_the_hub(
    run: Run, hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in hub.files[FILES] if name not in CODE]
    paths = [Path(hf_hub_download(FILES, name)) for name in names]
    assert listed(run)[TINY]["from"] == "hub, another program's"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert succeeded(run("pull", TINY)).strip() == str(paths[0].parent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    weights = next(each for each in paths if each.suffix == ".safetensors").resolve()
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    failed(run("pull", TINY), "another checksum", "model.safetensors")
    assert weights.read_bytes() == damaged


def test_a_newer_revision_is_pulled_when_asked_for(run: Run, hub: FakeHub) -> None:
    before = Path(succeeded(run("pull", TINY)).strip())
    hub.commit = "d" * 40
    hub.files[FILES]["generation_config.json"] = json.dumps({"temperature": 0.5}).encode()
    hub.sent.clear()
    assert answer(run("info", TINY, "--json"))["model"]
    assert not hub.sent
    after = Path(succeeded(run("pull", TINY)).strip())
    assert (before.name, after.name) == (COMMIT, hub.commit)
    assert hub.sent_bytes("model.safetensors") == 0
    assert (after / "model.safetensors").samefile(before / "model.safetensors")
