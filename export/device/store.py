"""Keeps a model in two folders, A and B, so that no update leaves a device without one.

    STORE/store.json     which folder is used, which is to be tried, the publisher's key
    STORE/__main__.py    runs the programs in use: python STORE [COMMAND]
    STORE/a/, STORE/b/   folders of `jaxllm export --format device`

An update, such a folder or a zip file of it, is written into the folder that is not used, each file by its
secure checksum, and the manifest by its signature if the store has a publisher's key. The next start tries it
in a process of its own, with its own loop: if that opens the programs and they answer as where they were
made, the update is used from then on, else the old model stays in use. Every change is a rename of one file
or folder, so that a killed process leaves the state before it or after it.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError, one_line
from jaxllm.export.device.opening import require_runtime
from jaxllm.export.device.update import Update, open_update
from jaxllm.export.folder_format.manifest import LOOP, MAIN, MANIFEST, STORE, Manifest
from jaxllm.export.folder_format.publisher import KEY_BYTES, read_public_key
from jaxllm.files.atomic import atomic_file, atomic_folder, remove_folder
from jaxllm.files.input_files import read_bytes
from jaxllm.layer_configs import require
from jaxllm.options import check_options, option

Slot = Literal["a", "b"]

_MAX_STATE_BYTES = 16 << 20
# A start may be ended from outside, as where memory is short: an update is tried so often.
_TRIALS = 3
# Programs open in seconds, on a slow device in a minute or two; a trial that hangs ends here.
_TRIAL_S = 900.0
_MAIN_TEXT = f'''"""Runs the model in use: python STORE [COMMAND], where STORE is this folder."""

import json
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_STATE = json.loads((_HERE / "{STORE}").read_text(encoding="utf-8"))
sys.path.insert(0, str(_HERE / _STATE["using"] / "{LOOP}"))

from jaxllm.cli.device.__main__ import main

main(_HERE)
'''
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreState:
    """What `store.json` has.

    Attributes:
      using: folder of the model in use.
      trying: folder of an update that the next start tries; None for none.
      trials: starts that have tried it.
      failed: why the last update is not used; empty for none.
      key: the publisher's public key in hex; empty for a store that takes unsigned updates.
      files: names of the files that this store wrote into each folder; it deletes no others.
    """

    using: Slot
    trying: Slot | None = None
    trials: int = option(0, low=0)
    failed: str = ""
    key: str = ""
    files: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        check_options(self)
        require(self.trying in (None, other(self.using)), f"an update in {self.trying!r:.80}")
        require(len(bytes.fromhex(self.key)) in (0, KEY_BYTES), "a key of other length")
        names = [name for each in self.files.values() for name in each]
        require(all(Path(name).name == name for name in names), "a name of a file that is none")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads and checks the state of a store.

        Raises:
          ProgramError: the folder is no store, or the file is malformed.
        """
        path = folder / STORE
        try:
            facts = json.loads(read_bytes(path, _MAX_STATE_BYTES))
            facts["files"] = {slot: tuple(each) for slot, each in facts["files"].items()}
            return cls(**facts)
        except OSError as error:
            raise ProgramError(f"{folder}: not a store of a model ({error.strerror})") from error
        except (ConfigError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ProgramError(f"{path}: malformed ({error!s:.200}); make the store again") from error


class ModelStore:
    """A store of a model (see the module).

    Attributes:
      folder: folder of the store.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a store. For errors see `StoreState.read`."""
        self.folder = folder.resolve()
        StoreState.read(self.folder)

    @classmethod
    def make(cls, folder: Path, source: Path, public_key: Path | None = None) -> Self:
        """Makes a store of a device folder, or of a zip file of it.

        Args:
          folder: the new folder.
          source: what is used first; signed, if there is a key.
          public_key: PEM file of the publisher's ed25519 key, which all updates must be signed with.

        Raises:
          ConfigError: the folder exists or cannot be written, or the key cannot be used.
          JaxllmError: the source is refused (see `install`).
        """
        if os.path.lexists(folder):
            raise ConfigError(f"{folder} exists already; remove it or name another folder")
        key = b"" if public_key is None else read_public_key(public_key)
        with open_update(source, key) as update, _written(folder), atomic_folder(folder) as place:
            require_runtime(source, update.manifest)
            place.chmod(0o700)
            (place / "a").mkdir()
            update.copy_to(place / "a")
            state = StoreState(using="a", key=key.hex(), files={"a": tuple(update.files)})
            (place / STORE).write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
            (place / MAIN).write_text(_MAIN_TEXT, encoding="utf-8")
        return cls(folder)

    @property
    def state(self) -> StoreState:
        """The state now. For errors see `StoreState.read`."""
        return StoreState.read(self.folder)

    def manifest(self, slot: Slot) -> Manifest:
        """The manifest of a folder (see `Manifest.read`)."""
        return Manifest.read(self.folder / slot)

    def facts(self) -> dict[str, str]:
        """The model in use, an update that the next start tries or why the last one failed, and the
        publisher's key."""
        state = self.state
        named: dict[str, Slot] = {"using": state.using}
        named |= {"trying": state.trying} if state.trying else {}
        facts = {}
        for what, slot in named.items():
            manifest = self.manifest(slot)
            facts[what] = f"{manifest.name}, release {manifest.release} ({slot})"
        facts |= {"failed": state.failed} if state.failed else {}
        return facts | {"signed": f"by {state.key}" if state.key else "no: updates need no signature"}

    def install(self, source: Path) -> str:
        """Writes an update into the folder that is not used, for the next start to try.

        Args:
          source: a device folder, or a zip file of one.

        Returns:
          What was done, for the user.

        Raises:
          ProgramError: the update is damaged, not signed by the publisher, not of a device, for a newer
            runtime, or no newer release than the one in use.
          BudgetExceeded: storage is full.
          ConfigError: another process changes the store, still uses the folder, or a file in it is not of
            this store; or the folder cannot be written.
        """
        with self._changing(wait=False) as state, open_update(source, bytes.fromhex(state.key)) as update:
            slot, current = other(state.using), self.manifest(state.using)
            for place, what in ((state.using, "in use"), (state.trying, "tried at the next start")):
                if place and (self.folder / place / MANIFEST).read_bytes() == update.raw:
                    return f"release {update.manifest.release} is {what} already; nothing was changed"
            if update.manifest.release <= current.release:
                raise ProgramError(
                    f"{source} is release {update.manifest.release}, and {current.release} is in use; an "
                    "update has a higher one (jaxllm export --release)"
                )
            require_runtime(source, update.manifest)
            place, ours = self.folder / slot, state.files.get(slot, ())
            self._require_space(update, sum(_size(place / name) for name in ours))
            update.copy_to(None)
            with _written(self.folder):
                # From here on nothing is to be tried: the folder is gone, then new.
                state = dataclasses.replace(state, trying=None, trials=0, failed="")
                self._write(state)
                self._clear(place, ours)
                files = {**state.files, slot: tuple(update.files)}
                self._write(state := dataclasses.replace(state, files=files))
                with atomic_folder(place) as folder:
                    update.copy_to(folder)
                self._write(dataclasses.replace(state, trying=slot))
        return f"release {update.manifest.release} is installed, and tried at the next start"

    def settled(self, commands: Callable[[Path], Sequence[Sequence[str]]]) -> Path:
        """Tries an update, if there is one, and returns the folder in use from then on; it stays until this
        process ends.

        Args:
          commands: of a folder, what starts processes that try it, one after the other, and end with exit
            code 0 if its programs open and answer as where they were made.

        Raises:
          ProgramError: see `StoreState.read`.
          ConfigError: the store cannot be written.
        """
        state = self.state
        if state.trying is not None:
            with self._changing(wait=True) as state, _written(self.folder):
                # Another process may have tried it meanwhile.
                if state.trying is not None:
                    state = self._tried(state, state.trying, commands(self.folder / state.trying))
        self._hold(state.using)
        return self.folder / state.using

    def _tried(self, state: StoreState, slot: Slot, commands: Sequence[Sequence[str]]) -> StoreState:
        why: str | None = f"{state.trials} starts of it were ended from outside"
        if state.trials < _TRIALS:
            # Written before: the trial may end this process, too.
            self._write(state := dataclasses.replace(state, trials=state.trials + 1))
            # The first that fails says why.
            why = next((each for each in map(_trial, commands) if each != ""), "")
            if why is None:
                return state
        assert why is not None
        if why:
            _log.warning("%s: the update is not used, but the model before it: %s", self.folder / slot, why)
        using = state.using if why else slot
        state = dataclasses.replace(state, using=using, trying=None, trials=0, failed=why)
        self._write(state)
        return state

    def _write(self, state: StoreState) -> None:
        with atomic_file(self.folder / STORE) as file:
            file.write(json.dumps(dataclasses.asdict(state)).encode())

    def _clear(self, place: Path, ours: Sequence[str]) -> None:
        """Removes a folder of this store, if it has no files of others."""
        if not os.path.lexists(place):
            return
        # Python compiles what starts a folder into one of its own.
        if others := sorted({each.name for each in place.iterdir()} - {*ours, "__pycache__"}):
            raise ConfigError(
                f"{place / others[0]} is not of this store, which deletes nothing else; move it away"
            )
        try:
            remove_folder(place)
        except BlockingIOError as error:
            raise ConfigError(
                f"{place} is used by a process that began before the last update; end it, then install"
            ) from error

    def _require_space(self, update: Update, freed_bytes: int) -> None:
        needed = sum(stored.size_bytes for stored in update.manifest.files.values()) + len(update.raw)
        free = shutil.disk_usage(self.folder).free + freed_bytes
        if needed > free:
            raise BudgetExceeded(
                f"{self.folder}: the update takes {needed:,} bytes of storage, and {free:,} are free; free "
                "some, and install it again"
            )

    @contextlib.contextmanager
    def _changing(self, *, wait: bool) -> Iterator[StoreState]:
        """Keeps other processes from changing the store, and yields its state."""
        import fcntl

        number = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.folder} is being changed by another process; try again later"
                ) from error
            yield self.state
        finally:
            os.close(number)

    def _hold(self, slot: Slot) -> None:
        """Keeps a folder from being replaced until this process ends."""
        import fcntl

        # Closed by the system alone.
        number = os.open(self.folder / slot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(number, fcntl.LOCK_SH)


def other(slot: Slot) -> Slot:
    """The other folder of a store."""
    return "b" if slot == "a" else "a"


@contextlib.contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Turns errors of storage into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise BudgetExceeded(
                f"{folder}: there is no storage left for the model ({error.strerror}); free some"
            ) from error
        raise ConfigError(f"{folder}: the model cannot be stored ({error.strerror})") from error


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_size
    return 0


def _trial(command: Sequence[str]) -> str | None:
    """Runs a process that tries programs; returns why they cannot be used, empty if they can, None if it was
    ended from outside."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not open within {_TRIAL_S:.0f} s"
    except OSError as error:
        return f"it could not be started ({error.strerror})"
    if not done.returncode:
        return ""
    if done.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        return None
    lines = done.stderr.decode(errors="replace").splitlines() or [""]
    return one_line(f"exit code {done.returncode}: {lines[-1].removeprefix('error: ')}")
