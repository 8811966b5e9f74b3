"""Orders of subgraphs: what they may do, what they take, and what nothing could beat."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import ORDERS
from jaxllm.int8_prefill.schedule import (
    INTEGER_STAGES,
    Dispatcher,
    Subgraph,
    lower_bound_ms,
    placed_by_memory,
    prompt_subgraphs,
    simulate,
    stage_operations,
)
from tests.tiny import TINY


def names(subgraphs, places) -> list[str]:
    return [
        f"{each.stage}{each.chunk}.{each.layer}" for each in (subgraphs[place] for place in sorted(places))
    ]


def test_what_needs_what():
    """Equations 2 and 3, on two chunks of a shadowed and a plain layer."""
    subgraphs = prompt_subgraphs(2, [True, False])
    needs = {
        name: names(subgraphs, each.needs)
        for name, each in zip(names(subgraphs, range(len(subgraphs))), subgraphs, strict=True)
    }
    assert needs["project0.0"] == needs["project_shadow0.0"] == []
    assert needs["attend0.0"] == ["project0.0", "project_shadow0.0"]
    assert needs["attend1.0"] == ["attend0.0", "project1.0", "project_shadow1.0"]
    assert needs["widen0.0"] == ["attend0.0"]
    assert needs["narrow0.0"] == ["widen0.0", "widen_shadow0.0"]
    assert needs["narrow_shadow0.0"] == ["narrow0.0"]
    assert needs["project1.1"] == ["narrow_shadow1.0"]
    assert needs["attend1.1"] == ["attend0.1", "project1.1"]
    assert needs["finish1.1"] == ["attend1.1"]
    assert all(max(each.needs, default=-1) < place for place, each in enumerate(subgraphs))


def test_two_chunks_by_hand():
    """While one chunk attends, the other's products run: 1 + 4·2 + 1 beside 2·(1 + 2 + 1)."""
    subgraphs = prompt_subgraphs(2, [False])
    times = {"project": 1.0, "attend": 2.0, "finish": 1.0}

    def time(each: Subgraph) -> float:
        return times[each.stage]

    assert simulate(subgraphs, time, "in-order").makespan_ms == 8
    out = simulate(subgraphs, time, "out-of-order")
    assert out.makespan_ms == lower_bound_ms(subgraphs, time) == 6
    assert out.busy_ms == {"integer": 4, "float": 4}
    assert out.idle_share == pytest.approx(1 / 3)


SPEEDS = st.floats(0.1, 10)


@settings(max_examples=40)
@given(
    chunks=st.integers(1, 5),
    shadowed=st.lists(st.booleans(), min_size=1, max_size=5),
    speeds=st.tuples(SPEEDS, SPEEDS, SPEEDS),
    order=st.sampled_from(ORDERS),
)
def test_every_order_is_a_schedule(chunks, shadowed, speeds, order):
    """Each subgraph runs once, after all that it needs, alone on its processor; never faster than the
    bound."""
    subgraphs = prompt_subgraphs(chunks, shadowed)

    def time(each: Subgraph) -> float:
        integer, attending, other = speeds
        return attending if each.stage == "attend" else integer if each.processor == "integer" else other

    found = simulate(subgraphs, time, order)
    for place, each in enumerate(subgraphs):
        assert found.ends_ms[place] == pytest.approx(found.starts_ms[place] + time(each))
        assert all(found.ends_ms[need] <= found.starts_ms[place] for need in each.needs)
    for processor in ("integer", "float"):
        own = [place for place, each in enumerate(subgraphs) if each.processor == processor]
        runs = sorted((found.starts_ms[place], found.ends_ms[place]) for place in own)
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(runs))
    assert found.makespan_ms >= lower_bound_ms(subgraphs, time) - 1e-9
    assert found.makespan_ms <= sum(map(time, subgraphs)) + 1e-9


def test_in_order_keeps_each_processors_order():
    subgraphs = prompt_subgraphs(3, [False, True])
    found = simulate(subgraphs, lambda each: 1.0, "in-order")
    for processor in ("integer", "float"):
        own = [place for place, each in enumerate(subgraphs) if each.processor == processor]
        starts = [found.starts_ms[place] for place in own]
        assert starts == sorted(starts)


def test_what_a_subgraph_contributes():
    """By hand: what becomes ready, and for whom."""
    subgraphs = prompt_subgraphs(2, [False, False])
    times = {"project": 1.0, "attend": 2.0, "finish": 4.0}
    dispatcher = Dispatcher(subgraphs, lambda each: times[each.stage])
    place = {name: at for at, name in enumerate(names(subgraphs, range(len(subgraphs))))}
    assert dispatcher.contribution(place["project0.0"]) == 2
    # The second chunk's attention waits for the first one's as well.
    assert dispatcher.contribution(place["project1.0"]) == 0
    assert dispatcher.contribution(place["attend0.0"]) == 4
    # The next product runs on the integer processor itself.
    assert dispatcher.contribution(place["finish0.0"]) == 0
    assert dispatcher.contribution(place["finish0.1"]) == 0
    # As the paper has it: the sign tells the processor, and all that becomes ready counts.
    assert dispatcher.literal_contribution(place["attend0.0"]) == 4
    assert dispatcher.literal_contribution(place["project0.0"]) == -2
    assert dispatcher.literal_contribution(place["project1.0"]) == 0
    assert dispatcher.literal_contribution(place["finish0.0"]) == -1


def test_little_memory_goes_to_the_heaviest():
    cfg = TINY
    shadowed = [False, True]

    def work(layer, stage):
        return stage_operations(cfg, stage, 16) / (1 + layer)

    def size(layer, stage):
        return 100

    placed = placed_by_memory(shadowed, size, work, 250)
    subgraphs = prompt_subgraphs(1, shadowed, placed)
    here = {(each.layer, each.stage) for each in subgraphs if each.processor == "integer"}
    every = [(each.layer, each.stage) for each in subgraphs if each.stage in INTEGER_STAGES]
    assert here == set(sorted(every, key=lambda each: -work(*each))[:2])
    assert simulate(subgraphs, lambda each: 1.0).makespan_ms > 0
    with pytest.raises(ConfigError, match="hold no subgraph"):
        placed_by_memory(shadowed, size, work, 99)


def test_refusals():
    circle = [Subgraph(0, 0, "project", "integer", (1,)), Subgraph(0, 0, "attend", "float", (0,))]
    with pytest.raises(ConfigError, match="wait for each other"):
        simulate(circle, lambda each: 1.0)


def test_what_shares_a_memory_takes_longer_together():
    """By hand: twice as long while both run; what goes on alone then goes on at its own speed."""
    pair = (
        Subgraph(0, 0, "project", "integer", ()),
        Subgraph(0, 0, "attend", "float", ()),
        Subgraph(0, 0, "finish", "integer", (1,)),
    )

    def alone(each: Subgraph) -> float:
        return {"project": 2.0, "attend": 4.0, "finish": 1.0}[each.stage]

    found = simulate(pair, alone, shared=lambda each: 2 * alone(each))
    # At 4 the float one has done half of its work; the other half takes 2 alone.
    assert found.ends_ms == (4.0, 6.0, 7.0)
    assert found.busy_ms == {"integer": 5.0, "float": 6.0}
    assert simulate(pair, alone, shared=alone) == simulate(pair, alone)
    assert simulate(pair, alone).ends_ms == (2.0, 4.0, 5.0)
