"""Reading or computing: by hand, against every division, and at the ends."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.contexts.recompute import LOST, Delay, plan_restore
from jaxllm.errors import ConfigError

BYTES = {8: 800, 4: 400, 2: 200}
FAST = dict(
    read_delay=Delay(fixed_ms=0.1, per_unit_ms=0.001), compute_delay=Delay(fixed_ms=0.0, per_unit_ms=1.0)
)


def test_both_end_together():
    """Eight chunks: reading one takes as long as computing it, so half of them are computed."""
    plan = plan_restore(
        dict.fromkeys(range(8), 8), BYTES, read_delay=Delay(fixed_ms=0, per_unit_ms=1 / 800),
        compute_delay=Delay(fixed_ms=0, per_unit_ms=1), buckets=(1, 2, 4, 8), layers=100,
    )  # fmt: skip
    assert plan.computed == (0, 1, 2, 3)
    assert plan.read == (4, 5, 6, 7)
    assert plan.expected_ms == pytest.approx(4 + 99 * 4 + 4)
    # Two are computed beside tokens of a prompt that take as long as four: six are read meanwhile.
    plan = plan_restore(
        dict.fromkeys(range(8), 8), BYTES, read_delay=Delay(fixed_ms=0, per_unit_ms=1 / 800),
        compute_delay=Delay(fixed_ms=0, per_unit_ms=1), buckets=(8,), layers=100, exact=True, beside_ms=4.0,
    )  # fmt: skip
    assert plan.computed == (0, 1)
    assert plan.expected_ms == pytest.approx(6 + 99 * 6 + 6)


def test_the_widest_are_computed():
    plan = plan_restore({0: 2, 1: 8, 2: 4, 3: 8, 4: 2}, BYTES, **FAST, buckets=(1,), layers=10)
    assert plan.computed == (1,)
    assert plan.read == (0, 2, 3, 4)


def test_lost_chunks_are_computed_whatever_it_takes():
    """And without buckets all is read."""
    slow = Delay(fixed_ms=100, per_unit_ms=100)
    fast = Delay(fixed_ms=0, per_unit_ms=0.0001)
    plan = plan_restore(
        {3: LOST, 4: 2, 5: LOST}, BYTES, read_delay=fast, compute_delay=slow, buckets=(2, 8), layers=4
    )
    assert (plan.computed, plan.bucket) == ((3, 5), 2)
    assert plan_restore({0: 8, 1: 2}, BYTES, **FAST, buckets=(), layers=4).read == (0, 1)


@settings(max_examples=50)
@given(
    missing=st.dictionaries(st.integers(0, 20), st.sampled_from([8, 4, 2, LOST]), max_size=6),
    read_fixed=st.floats(0, 2), read_each=st.floats(0, 0.01), compute_fixed=st.floats(0, 2),
    compute_each=st.floats(0, 2), layers=st.integers(1, 6),
    buckets=st.sampled_from([(8,), (1, 2, 8), (3, 6)]),
)  # fmt: skip
def test_no_other_division_is_sooner(
    missing, read_fixed, read_each, compute_fixed, compute_each, layers, buckets
):
    reading = Delay(fixed_ms=read_fixed, per_unit_ms=read_each)
    computing = Delay(fixed_ms=compute_fixed, per_unit_ms=compute_each)
    plan = plan_restore(
        missing, BYTES, read_delay=reading, compute_delay=computing, buckets=buckets, layers=layers
    )
    assert sorted(plan.read + plan.computed) == sorted(missing)
    assert len(plan.computed) <= plan.bucket or not plan.computed

    def took(computed):
        read = reading.ms(sum(BYTES[missing[chunk]] for chunk in missing if chunk not in computed))
        bucket = min(each for each in (0, *buckets) if each >= len(computed))
        compute = computing.ms(bucket)
        return read + (layers - 1) * max(read, compute) + compute

    possible = [
        took(set(computed))
        for count in range(len(missing) + 1)
        for computed in itertools.combinations(missing, count)
        if all(chunk in computed for chunk in missing if missing[chunk] == LOST)
    ]
    assert plan.expected_ms == pytest.approx(took(set(plan.computed)))
    assert plan.expected_ms <= min(possible) + 1e-9


def test_a_line_through_what_was_measured():
    assert Delay.fit([1, 2, 3], [3, 5, 7]) == Delay(fixed_ms=1, per_unit_ms=2)
    # Never below zero.
    through_nothing = Delay.fit([1, 2], [1, 4])
    assert through_nothing.fixed_ms == 0
    assert through_nothing.per_unit_ms == pytest.approx(9 / 5)
    assert Delay.fit([1, 2], [4, 2]) == Delay(fixed_ms=3, per_unit_ms=0)
    with pytest.raises(ConfigError, match="two different amounts"):
        Delay.fit([2, 2], [1, 3])
    with pytest.raises(ConfigError, match="not negative"):
        Delay(fixed_ms=-1, per_unit_ms=0)
