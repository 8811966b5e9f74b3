"""Masks that a step asks another process for: what it sends, what it reads, what it leaves to the host."""

import array
import functools
import random
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.native_masks import CLOSED, KEPT, MASK, WAITING, MaskChannel, follow
from jaxllm.serving.guided import worker
from tests.kernels.switching import needs_native

pytestmark = needs_native
VOCAB = 83
# Tokens of plain text are the even ones below 40.
PLAIN = np.packbits([each % 2 == 0 and each < 40 for each in range(VOCAB)], bitorder="little").tobytes()
OPEN, NARROW = np.zeros(VOCAB, np.float32), np.where(np.arange(VOCAB) < 9, 0, -np.inf).astype(np.float32)
BITS = np.random.default_rng(0).integers(0, 2, VOCAB).astype(bool)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def state(taken=1, *, completes=False, goes_on=True, forced=(), bits=BITS, ok=1):
    head = worker._HEAD.pack(taken, True, completes, False, goes_on, len(forced))
    mask = np.packbits(bits, bitorder="little").tobytes()
    return bytes([ok]) + head + array.array("I", forced).tobytes() + mask


@jax.jit
def _asked(channel, tokens, mask, ints):
    return follow(channel, tokens, mask, ints)


def asked(channel, tokens, mask=NARROW, *, first=0, left=-1, asks=1):
    rows = jnp.full((1, 6), -1, jnp.int32).at[0, : len(tokens)].set(jnp.array(tokens, jnp.int32))
    ints = np.array([asks, first, len(tokens), left], np.int32)
    found, reply = _asked(channel.operand, rows, mask, ints)
    return np.asarray(found), int(reply)


def replies(theirs, *messages):
    """Answers the next requests in another thread; the requests are in the list that it fills."""
    requests = []

    def serve():
        for each in messages:
            requests.append(array.array("I", worker.receive(theirs)).tolist())
            theirs.sendall(each)

    thread = threading.Thread(target=serve)
    thread.start()
    return requests, thread


def framed(message):
    return worker._LENGTH.pack(len(message)) + message


def test_a_mask_is_asked_for_and_read(ends):
    ours, theirs = ends
    channel = MaskChannel(ours.fileno(), PLAIN)
    requests, thread = replies(theirs, framed(state()), framed(state(3, bits=~BITS)))
    found, reply = asked(channel, [4])
    assert reply == MASK
    np.testing.assert_array_equal(found, np.where(BITS, 0, -np.inf))
    # Of tokens that share a mask the last decides whether to ask.
    assert asked(channel, [4, 2], OPEN)[1] == KEPT
    found, reply = asked(channel, [4, 2, 6, 41], OPEN, first=1, left=7)
    assert reply == MASK
    np.testing.assert_array_equal(found, np.where(BITS, -np.inf, 0))
    thread.join()
    assert requests == [[worker.NO_LIMIT, 4], [7, 2, 6, 41]]
    found, reply = asked(channel, [41], asks=0)
    assert reply == KEPT
    np.testing.assert_array_equal(found, NARROW)


@pytest.mark.parametrize(
    "message",
    [
        state(0),
        state(2),
        state(completes=True),
        state(goes_on=False),
        state(forced=[5, 6]),
        state(ok=0),
        state(bits=BITS[:70]),
        state(bits=np.ones(8 * VOCAB + 8, bool)),
        b"\0the grammar is too complex",
        b"\0no",
    ],
)
def test_what_is_more_than_a_mask_stays_in_the_socket(ends, message):
    ours, theirs = ends
    channel = MaskChannel(ours.fileno(), PLAIN)
    _, thread = replies(theirs, framed(message))
    found, reply = asked(channel, [4])
    assert reply == WAITING
    np.testing.assert_array_equal(found, NARROW)
    thread.join()
    assert worker.receive(ours) == message


def test_a_late_reply_stays_and_nobody_waits_for_it(ends):
    ours, theirs = ends
    channel = MaskChannel(ours.fileno(), PLAIN)
    assert asked(channel, [4])[1] == WAITING
    worker.send(theirs, state())
    assert worker.receive(ours) == state()


def test_a_process_that_ends_in_the_middle_of_a_reply_is_found(ends):
    ours, theirs = ends
    channel = MaskChannel(ours.fileno(), PLAIN)
    theirs.sendall(framed(state())[:-1])
    theirs.shutdown(socket.SHUT_WR)
    assert asked(channel, [4])[1] == WAITING
    assert worker.receive(ours) == b""
    theirs.close()
    assert asked(channel, [4])[1] == CLOSED


def test_any_bytes_are_a_mask_or_stay(ends):
    draw = random.Random(0)
    for _ in range(60):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel = MaskChannel(ours.fileno(), PLAIN)
            message = bytearray(framed(state()))
            for _ in range(draw.randrange(4)):
                message[draw.randrange(21)] = draw.randrange(256)
            theirs.sendall(message)
            theirs.shutdown(socket.SHUT_WR)
            found, reply = asked(channel, [4])
            assert reply in (MASK, WAITING)
            assert {*found.tolist()} <= {0.0, -np.inf}


def test_channels_have_descriptors_of_their_own_and_close():
    ours, theirs = socket.socketpair()
    with theirs:
        channel = MaskChannel(ours.fileno(), b"")
        with ours:
            pass
        _, thread = replies(theirs, framed(state()))
        # Without tokens of plain text any is asked about.
        assert asked(channel, [4], OPEN)[1] == MASK
        thread.join()
        channel.close()
        assert asked(channel, [4])[1] == CLOSED
        assert theirs.recv(1) == b""
    with pytest.raises(ValueError, match="no open socket"):
        MaskChannel(ours.fileno(), b"")
    closed = functools.partial(asked, type("Nothing", (), {"operand": np.array([5, 9], np.uint32)}))
    assert closed([4])[1] == CLOSED
