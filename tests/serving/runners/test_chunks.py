import itertools

import pytest

from jaxllm.serving.runners.runner import _PASS_TOKENS, plan_chunks

LENGTHS = (16, 64, 256)


@pytest.mark.parametrize("lengths", [(16,), (16, 64), LENGTHS, (32, 128, 512)])
def test_covers_every_length_and_pads_only_the_last(lengths):
    for tokens in range(1, 1200):
        plan = plan_chunks(tokens, lengths)
        assert set(plan) <= set(lengths)
        assert sum(plan[:-1]) < tokens <= sum(plan)


def test_is_as_cheap_as_the_best_of_all_plans():
    def cost(plan):
        return sum(plan) + _PASS_TOKENS * len(plan)

    lengths = (16, 32, 64)
    for tokens in range(1, 129):
        every = (
            plan
            for count in range(1, 9)
            for plan in itertools.combinations_with_replacement(lengths, count)
            if sum(plan) >= tokens
        )
        assert cost(plan_chunks(tokens, lengths)) == min(map(cost, every)), tokens


def test_small_cases():
    plans = {1: [16], 16: [16], 256: [256], 272: [256, 16], 250: [256], 2048: [256] * 8}
    assert {tokens: plan_chunks(tokens, LENGTHS) for tokens in plans} == plans
