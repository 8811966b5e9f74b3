"""A store that writes in the background, in a process that is killed at its k-th file operation, or at some
moment."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from jaxllm.contexts.recompute import LOST
from jaxllm.serving.contexts.growth import agreeing_record
from jaxllm.serving.contexts.record import Origin, Record
from jaxllm.serving.contexts.saving import compact
from jaxllm.serving.contexts.store import ContextStore
from tests.faults import KillingDevice

ORIGIN = Origin(
    model="m", level=100, adapter="", codec="channel", chunk_tokens=2, dtype="float16", heads=(5, 4, 5),
    head_width=16,
)  # fmt: skip
# Widths of the chunks of three contexts after each call: they grow, are stored at fewer bits, and slide. The
# third begins as the first does.
CALLS = (
    (0, (8, 8)),
    (2, (8, 8)),
    (1, (8,)),
    (0, (4, 8, 8)),
    (0, (2, 4, 4, 8)),
    (1, (4, 8)),
    (0, (2, 8)),
    (2, (4, 8, 4)),
    (1, (4, 2, 8)),
)


@dataclasses.dataclass
class Seen:
    """What a process said before it was killed.

    Attributes:
      tokens: of each context, by its number, after the calls that had ended.
      names: of the contexts.
      operations: of all calls, where it was not killed.
      took_s: for all calls.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    tokens: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    operations: int = 0
    took_s: float = 0.0


def write_until_killed(root: Path, at: int | None, after_s: float | None = None) -> Seen:
    """Runs all calls in a process that is killed.

    Args:
      root: of the store.
      at: number of the file operation at which it is killed; None for none.
      after_s: time from its first call to its kill, if it runs so long; None for none.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    ours, theirs = server.Pipe(duplex=False)
    child = server.Process(target=_write, args=(theirs, root, at))
    child.start()
    theirs.close()
    seen, began = Seen(), 0.0
    while True:
        try:
            what, *rest = ours.recv()
        except EOFError:
            break
        if what == "made":
            seen.names, began = rest, time.monotonic()
            if after_s is not None and child.pid is not None:
                time.sleep(after_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
        elif what == "ended":
            seen.tokens[rest[0]] = rest[1]
        else:
            seen.operations, seen.took_s = rest[0], time.monotonic() - began
    ours.close()
    child.join()
    ended = child.exitcode == 0 and seen.operations
    assert ended or (child.exitcode == -signal.SIGKILL and (at is not None or after_s is not None))
    return seen


def check(root: Path, seen: Seen) -> None:
    """Checks that nothing of ended calls is lost, and that nothing is left over once the store is swept."""
    with ContextStore(root) as store:
        assert store.verify() == []
        for number, tokens in seen.tokens.items():
            record = store.record(seen.names[number])
            # The call under way may have got so far.
            following = [_tokens(at) for at, (n, _) in enumerate(CALLS) if n == number]
            assert record.tokens in following[following.index(tokens) :]
            assert LOST not in record.bits
        store.sweep()
        for record in store.records():
            folder = root / f"app-{record.app}" / record.name
            left = {each.name for each in folder.iterdir()}
            assert left == set(record.segments)
        assert store.verify() == []


def _tokens(call: int) -> tuple[int, ...]:
    number, bits = CALLS[call]
    count = 2 * len(bits) + 1
    slid = call == len(CALLS) - 3
    return tuple(range(100 * (number % 2), 100 * (number % 2) + 2)) + tuple(
        range(50 + slid, 50 + slid + count - 2)
    )


def _write(said: Connection, root: Path, at: int | None) -> None:
    store = ContextStore(root)
    names = [store.create("mail", ORIGIN).name for _ in range(3)]
    store.write_later()
    said.send(("made", *names))
    with KillingDevice(root, at) as device:
        for call, (number, bits) in enumerate(CALLS):
            store.wait(names[number])
            before = store.record(names[number])
            record = _grown(before, _tokens(call), bits)
            agreed = agreeing_record(before, record.tokens, ORIGIN.chunk_tokens)
            kept = len(agreed.bits)
            chunks = {n: (b, _blobs(b)) for n, b in enumerate(bits) if n >= kept or before.bits[n] != b}
            linked = {}
            if number == 2 and not before.tokens:
                store.wait(names[0])
                linked = store.link(record, names[0], {0: bits[0]})
                assert linked
            own = {n: each for n, each in chunks.items() if n not in linked}
            store.note(agreed)
            store.commit_later(record, own, _never, lambda name: compact(store, name), linked=linked)
            said.send(("ended", number, record.tokens))
        store.close()
        operations = device.operations
    said.send(("all", operations))


def _grown(before: Record, tokens: tuple[int, ...], bits: tuple[int, ...]) -> Record:
    mass = (0.5,) * len(bits)
    return dataclasses.replace(before, tokens=tokens, bits=bits, mass=mass, seen=mass)


def _blobs(bits: int) -> list[np.ndarray]:
    return [np.full(size, bits, np.uint8) for size in ORIGIN.layer_bytes[bits]]


def _never(name: str, error: Exception) -> None:
    raise AssertionError(f"{name}: {error}")
