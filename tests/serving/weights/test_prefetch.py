"""Pieces come by the ranges that were asked for last, and a closed stream says so."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.experts.mixture import no_visits, tiles_and_weights
from jaxllm.experts.routing import Routing
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.direct_io import PAGE, PieceReader
from jaxllm.serving.weights.memory_plan import MemoryBudget, activation_bytes, outputs_bytes, plan_memory
from jaxllm.serving.weights.pieces import LayerPiece, Range
from jaxllm.serving.weights.prefetch import WeightStream
from jaxllm.speculation.tree import new_tree
from jaxllm.steps.trees import settle
from tests.kernels.switching import fall_back
from tests.tiny import TINY

LAYERS, SIZE = 4, 8 * PAGE


@pytest.fixture
def path(tmp_path):
    content = np.repeat(np.arange(1, LAYERS + 1, dtype=np.uint8), SIZE)
    (tmp_path / "layers").write_bytes(content.tobytes())
    return tmp_path / "layers"


def pieces(size):
    """Of each layer the first `size` bytes."""
    return [
        LayerPiece(
            layer=layer,
            segment=f"layers.{layer}",
            start=0,
            ranges=(Range(offset=layer * SIZE, size_bytes=size, place=0),),
            memory_bytes=SIZE,
        )
        for layer in range(LAYERS)
    ]


def opened(path, part, *, resident=(), slots=2, reading=None):
    """A stream; `reading` is called before each read, with its place in the file."""
    reader = PieceReader(path)
    if reading is not None:
        read_into = reader.read_into

        def read(memory, place, offset, size):
            reading(offset)
            read_into(memory, place, offset, size)

        reader.read_into = read
    return WeightStream(reader, part, resident=resident, slots=slots, slot_bytes=SIZE)


def all_read(stream, count):
    """Waits until so many pieces have been read ahead."""
    until = time.monotonic() + 10
    while sum(each.ready for each in stream._ahead) < count:
        assert time.monotonic() < until
        time.sleep(0.001)


class Preempted:
    """Who gives the lock back, but for the thread that reads, is preempted at once."""

    def __init__(self, lock):
        self._lock = lock

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.01)


def test_a_piece_is_never_filled_by_the_ranges_before(path):
    half, whole = pieces(SIZE // 2), pieces(SIZE)
    stream = opened(path, half)
    stream._lock = Preempted(stream._lock)
    for _ in range(2):
        for part in (half, whole):
            stream.use(part)
            (size,) = {each.size_bytes for piece in part for each in piece.ranges}
            for layer in range(LAYERS):
                with stream.piece(layer) as slot:
                    assert (slot.memory[:size] == layer + 1).all()
                    # So that nothing is there that was not read.
                    slot.memory[:] = 0
    stream.close()
    # A closed stream is refused, and nobody waits for it.
    with pytest.raises(ConfigError, match="the engine of these weights is closed"), stream.piece(1):
        pass


def numbers(slots):
    return [int(slot.memory[0]) - 1 for slot in slots]


@pytest.mark.parametrize(
    ("slots", "resident", "expected"),
    [
        # Half of the slots are read into while the pieces of the others are computed.
        (4, (), [[0, 1], [2, 3]]),
        (2, (), [[0], [1], [2], [3]]),
        # A resident piece goes along before one that was read, and not behind it.
        (2, (0, 2), [[0, 1], [2, 3]]),
        (2, (1, 2), [[0], [1, 2, 3]]),
        (4, (1, 3), [[0, 1, 2], [3]]),
    ],
)
def test_pieces_that_are_in_memory_come_together(path, slots, resident, expected):
    stream = opened(path, pieces(SIZE), resident=resident, slots=slots)
    for number, memory in stream.staying().items():
        memory[:] = number + 1
    read = LAYERS - len(resident)
    # The first pass starts the reads; in the last no more than one may come.
    for most, passes in ((LAYERS, None), (LAYERS, expected), (1, [[0], [1], [2], [3]])):
        found, at = [], 0
        while at < LAYERS:
            if passes is not None:
                all_read(stream, min(slots, read))
            with stream.pieces(at, min(most, LAYERS - at)) as some:
                found.append(numbers(some))
            at += len(some)
        assert passes is None or found == passes
    stream.close()


def test_nobody_waits_for_a_second_piece(path):
    """While the first is read there is time for other work; then it comes alone."""
    may_end = [threading.Event() for _ in range(LAYERS)]

    def reading(offset):
        assert may_end[offset // SIZE].wait(10)

    stream = opened(path, pieces(SIZE), slots=4, reading=reading)
    for at in range(LAYERS):
        calls = []

        def meanwhile(busy_s, calls=calls, at=at):
            assert busy_s >= 0
            calls.append(at)
            if len(calls) == 3:
                may_end[at].set()
            time.sleep(0.001)
            return True

        with stream.pieces(at, LAYERS - at, meanwhile) as some:
            assert numbers(some) == [at]
        assert len(calls) >= 3
    # Two are there: nothing is waited for.
    all_read(stream, 4)
    with stream.pieces(0, 4, lambda _: pytest.fail("nothing is waited for")) as some:
        assert numbers(some) == [0, 1]
    stream.close()


def test_storage_has_the_next_piece_to_read_before_one_ends(path):
    second = threading.Event()

    def reading(offset):
        if offset:
            second.set()
        # A stream that read one piece at a time would never go on.
        assert second.wait(10)

    stream = opened(path, pieces(SIZE), slots=3, reading=reading)
    for layer in range(LAYERS):
        with stream.piece(layer) as slot:
            assert (slot.memory[:SIZE] == layer + 1).all()
    # Time in which both were read counts once.
    assert stream.counts.read_bytes >= LAYERS * SIZE
    assert stream.counts.read_s < 5
    stream.close()


# The division of a budget, in exact small cases.


@pytest.mark.parametrize(
    ("sizes", "budget", "fixed", "slots", "slot_bytes", "resident", "planned"),
    [
        # All stays where all fits.
        ([10] * 4, 45, 5, 0, None, (0, 1, 2, 3), 45),
        # Two pieces are read in turn, and the rest stays, evenly between those that are read.
        ([10] * 8, 60, 0, 2, 10, (0, 2, 4, 6), 60),
        # Slots fit the largest, and small pieces fill what is left.
        ([4, 20, 4, 20, 4], 49, 0, 2, 20, (0, 4), 48),
    ],
)
def test_a_budget_is_divided(sizes, budget, fixed, slots, slot_bytes, resident, planned):
    found = plan_memory(sizes, MemoryBudget(budget, fixed, "a context"))
    assert (found.slots, found.resident, found.planned_bytes) == (slots, resident, planned)
    assert slot_bytes in (None, found.slot_bytes)
    # Below two pieces there is no way.
    with pytest.raises(BudgetExceeded, match=r"24 bytes .*at least 26 \(6 for a context, 2 times 10"):
        plan_memory([10] * 8, MemoryBudget(24, 5, "a context"))


# Of two sizes, because what was traced is kept.
@pytest.mark.parametrize(("kernels", "vocab"), [(True, 8192), (False, 16384)])
def test_the_logits_of_a_tree_are_counted(kernels, vocab, monkeypatch):
    """Those that the graph takes which settles a tree, and what it computes of them."""
    if not kernels:
        fall_back(monkeypatch)
    cfg, trees = dataclasses.replace(TINY, vocab_size=vocab), TreeShape(nodes=(8, 16), room=32, tips=2)
    tree = new_tree(jnp.int32(0), trees.nodes[-1])
    logits = jax.ShapeDtypeStruct((trees.nodes[-1], cfg.vocab_size), jnp.float32)
    graph = jax.jit(settle).lower(
        tree, logits, sampler_state(Sampling(), [], cfg.vocab_size, 0), jnp.int32(5)
    )
    takes = graph.compile().memory_analysis().temp_size_in_bytes + logits.size * 4
    options = EngineOptions().resolve(cfg, quantized=True)
    plain, with_trees = (
        activation_bytes(cfg, dataclasses.replace(options, trees=each)) for each in (None, trees)
    )
    one = 2 * cfg.vocab_size * 4
    # Beside the logits some arrays of nodes.
    assert takes - 65536 <= with_trees - plain + one <= 1.1 * takes


@pytest.mark.parametrize(("experts", "choices"), [(128, 8), (8, 1)])
def test_what_experts_make_of_a_prompt_is_counted(experts, choices):
    """As many rows as the tables of streamed experts hold, a little more than there are pairs."""
    cfg = dataclasses.replace(
        TINY, model_type="qwen3_moe", qk_norm=True, attention_windows=(), experts=experts,
        experts_per_token=choices, expert_ffn_size=64, sparse_layers=(True, True), window_tokens=4096,
    )  # fmt: skip
    options = EngineOptions(context_tokens=4096).resolve(cfg, quantized=True)
    chunk = options.chunk_tokens[-1]

    def visits():
        ids = jnp.zeros((1, chunk, choices), jnp.int32)
        routing = Routing(jnp.zeros((1, chunk, experts)), ids, jnp.zeros(ids.shape))
        tiles, _ = tiles_and_weights(routing, experts, valid_rows=jnp.ones(chunk, bool))
        return no_visits(jnp.zeros((chunk, cfg.hidden_size)), tiles)

    needed = 4096 // chunk * jax.eval_shape(visits).size * 4
    assert outputs_bytes(cfg, options) == needed
    assert needed <= 2 * 4096 * choices * cfg.hidden_size * 4
