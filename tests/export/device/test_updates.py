"""Updates of a store beside contexts, by the loop that a device runs: what goes on, what is computed again,
what falls back; and kill -9 at random moments, after which a model opens and every context is there."""

import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from jaxllm.export.device.contexts import ProgramContexts
from jaxllm.export.device.opening import open_device
from jaxllm.export.device.store import ModelStore
from jaxllm.export.folder_format.manifest import LOOP, MAIN, Manifest, StoredFile
from jaxllm.export.folder_format.publisher import read_private_key
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.device.conftest import FOLDER_VARIABLE, updated, zipped
from tests.export.device.test_store import write_key
from tests.export.sizes import CONTEXT

# A folder with its loop, which opens in a fraction of a second.
pytestmark = pytest.mark.skipif(
    FOLDER_VARIABLE not in os.environ, reason="runs on a device (make test-device)"
)


def with_note(folder, release):
    """The loop of a folder with one file more."""
    loop = io.BytesIO((folder / LOOP).read_bytes())
    with zipfile.ZipFile(loop, "a") as file:
        file.writestr("note", str(release))
    return loop.getvalue()


def older_loop():
    """A loop that runs folders alone."""
    loop, code = io.BytesIO(), "def main(folder): __import__('sys').exit('no store here')"
    with zipfile.ZipFile(loop, "w") as file:
        for name in ("", "cli/", "cli/device/"):
            file.writestr(f"jaxllm/{name}__init__.py", "")
        file.writestr("jaxllm/cli/device/__main__.py", code)
    return loop.getvalue()


# What an update changes, by the files that it has.
KINDS = {
    "nothing": lambda folder, release: {},
    "loop": lambda folder, release: {LOOP: with_note(folder, release)},
    "model": lambda folder, release: {"more.weights": str(release).encode()},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_key(tmp_path_factory.mktemp("keys") / "publisher.pem")


@pytest.fixture
def place(folder, keys, tmp_path):
    """A store of release 1."""
    first = updated(folder, tmp_path / "first", release=1, sign=read_private_key(keys[0]))
    return ModelStore.make(tmp_path / "store", first, keys[1]).folder


def test_contexts_go_on_and_what_fails_falls_back(folder, place, keys, tmp_path):
    sign, releases = read_private_key(keys[0]), itertools.count(2)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-P", str(place), *arguments], cwd=tmp_path, capture_output=True, text=True,
            check=False, env={"JAXLLM_CACHE": str(tmp_path / "cache")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    def turn(name):
        # One chunk, and a little of the next.
        asked = (
            "-p",
            "a chunk of tokens" if name == "new" else "a",
            "--max-tokens",
            "2",
            "--ignore-eos",
            "--json",
        )
        done = run("call", "--contexts", str(tmp_path / "contexts"), "--context", name, *asked)
        return json.loads(done.stdout), done.stderr

    def install(**how):
        release = next(releases)
        update = updated(folder, tmp_path / f"update-{release}", release=release, sign=sign, **how)
        run("install", str(zipped(update, tmp_path / f"{release}.zip")))
        return release

    def status():
        return ModelStore(place).facts()

    first, _ = turn("new")
    name, before = first["context"], status()["using"]
    for kind, files in KINDS.items():
        release = install(**files(folder, 0))
        answer, said = turn(name)
        assert (answer.get("moved"), said) == (["model"] if kind == "model" else None, "")
        assert before != (before := status()["using"])
        assert f"release {release} " in before
    golden = Manifest.read(folder).golden
    wrong = tuple(
        dataclasses.replace(each, tokens=tuple(token ^ 1 for token in each.tokens)) for each in golden
    )
    for how, why in (
        ({LOOP: b"no archive"}, "No module named"),
        ({LOOP: older_loop()}, "no store here"),
        ({"golden": wrong, "more.weights": b"1"}, "answers otherwise than where the programs were made"),
        ({MAIN: b"import os; os.abort()"}, "exit code -6"),
    ):
        install(**how)
        answer, said = turn(name)
        assert "moved" not in answer
        assert "the update is not used, but the model before it" in said
        assert why in status()["failed"]
        assert status()["using"] == before


# Of the campaign; the short one is a part of it.
KILLS = int(os.environ.get("JAXLLM_TEST_KILLS", "100"))
SERVER = multiprocessing.get_context("forkserver")
CONFIG = GenerationConfig(max_tokens=2, ignore_eos=True)


def live(said, place, contexts, update, seed):
    """Starts as a device does, installs an update, and goes on with contexts until it is killed."""
    try:
        draw, store = random.Random(seed), ModelStore(place)
        start = [sys.executable, "-m", "jaxllm.cli.device", "--threads", "1"]
        folder = store.settled(lambda update: [[*start, str(update), "facts"]])
        kept = ProgramContexts(open_device(folder, threads=1), contexts, budget_bytes=1 << 16)
        key, deeds = kept.engine.model.program_files, itertools.count()
        said.send(("open", store.manifest(store.state.using).release))
        install_at = draw.randrange(4)
        for deed in deeds:
            if deed == install_at:
                said.send(("installs",))
                store.install(update)
                said.send(("installed",))
            records = kept.store.records()
            if len(records) < 3:
                name = kept.create("app").name
            else:
                record = draw.choice(records)
                name = record.name
                if len(record.tokens) > CONTEXT - 12:
                    said.send(("begin", name))
                    kept.delete(name)
                    said.send(("deleted", name))
                    continue
            said.send(("begin", name))
            context = Context(kept, kept.record("app", name))
            answer = context.answer([draw.randrange(90) for _ in range(7)], CONFIG).result()
            moved = bool(answer.restoration.moved)
            said.send(("end", name, context.tokens, moved, sorted(key.items())))
    except Exception as error:
        said.send(("failed", repr(error)))


class Driver:
    """Lives and kills, and what is known of the contexts: tokens and programs of each, as acknowledged."""

    def __init__(self, place, contexts, cache):
        self.place, self.contexts, self.cache = place, contexts, cache
        self.known, self.opened, self.installed, self.moved, self.kept = {}, 0, 0, 0, 0
        self.release = 1

    def life(self, update, seed, after_s=None):
        """A life that is killed after some seconds, or once it is open; returns its seconds."""
        ours, theirs = SERVER.Pipe(duplex=False)
        child = SERVER.Process(target=live, args=(theirs, self.place, self.contexts, update, seed))
        child.start()
        theirs.close()
        began_s = time.monotonic()
        ours.poll(after_s)
        time.sleep(max(0, began_s + (after_s or 0) - time.monotonic()))
        lived_s = time.monotonic() - began_s
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        under_way = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                under_way = self.heard(ours.recv(), under_way)
        ours.close()
        self.look(under_way)
        return lived_s

    def heard(self, message, under_way):
        """Takes what a life said; returns the context that it is changing."""
        match message:
            case ("open", release):
                assert release >= self.release
                self.release, self.opened = release, self.opened + 1
            case ("installed",):
                self.installed += 1
            case ("begin", name):
                return name
            case ("deleted", name):
                del self.known[name]
            case ("end", name, tokens, moved, programs):
                if (before := self.known.get(name)) is not None and before[1] is not None:
                    assert tokens[: len(before[0])] == before[0]
                    # Computed again where the programs are others, and only there.
                    assert moved == (before[1] != programs)
                    self.moved, self.kept = self.moved + moved, self.kept + (not moved)
                self.known[name] = tokens, programs
            case ("failed", why):
                raise AssertionError(why)
        return None

    def look(self, under_way):
        """What must be true after a kill: a whole model is in use, and every context is there."""
        state = ModelStore(self.place).state
        manifest = Manifest.read(self.place / state.using)
        for name, stored in manifest.files.items():
            assert StoredFile.of(self.place / state.using / name) == stored
        assert manifest.release >= self.release
        assert not state.failed or "ended from outside" in state.failed
        with ContextStore(self.contexts) as store:
            there = {record.name: record.tokens for record in store.records()}
        if under_way is not None:
            # It may have ended before that was said, or be new or gone.
            before = self.known.pop(under_way, ((), None))
            if under_way in there:
                assert there[under_way][: len(before[0])] == before[0]
                self.known[under_way] = there[under_way], None
        assert {name: tokens for name, (tokens, _) in self.known.items()} == {
            name: tokens for name, tokens in there.items() if tokens or name in self.known
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills", [10, pytest.param(KILLS, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])]
)
def test_kills_lose_nothing(folder, place, keys, tmp_path, monkeypatch, kills):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    SERVER.set_forkserver_preload([__name__])
    sign, draw = read_private_key(keys[0]), random.Random(kills)
    driver = Driver(place, tmp_path / "contexts", tmp_path / "cache")
    most_s = None
    for release in range(2, kills + 2):
        kind = list(KINDS)[release % len(KINDS)]
        place = tmp_path / str(release)
        update = updated(folder, place, release=release, sign=sign, **KINDS[kind](folder, release))
        update = zipped(update, place.with_suffix(".zip"))
        if most_s is None:
            # As long as it takes to try an update and to open it, and again for turns and another update.
            ModelStore(driver.place).install(update)
            most_s = 2 * driver.life(update, release)
        driver.life(update, release, draw.uniform(0, most_s))
    assert driver.opened > kills // 3
    assert min(driver.installed, driver.kept) > kills // 10
    print(
        f"{kills} kills, {driver.opened} opened, {driver.installed} installed, release {driver.release}, "
        f"{driver.moved} turns computed again, {driver.kept} restored"
    )
