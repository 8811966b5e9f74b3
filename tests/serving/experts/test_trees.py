"""Mixtures answer with drafts token for token as without: a tree is read to the bit as its tokens alone."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.runners.layerwise import LayerwiseRunner
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.speculation.tree import line_tree
from tests.kernels.switching import needs_native
from tests.serving.experts.conftest import CFG, OPTIONS, budget

NODES = 16
SHAPE = dataclasses.replace(OPTIONS, trees=TreeShape())


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("width", "weights", "loss"),
    [(2, "int8", 0.0), (4, "int8", 0.0), (8, "int8", 0.0), (8, "int8-nested", 0.0), (8, "int8-nested", 0.4)],
)
def test_a_tree_is_read_as_its_tokens_one_by_one(bundle_of, width, weights, loss):
    """Experts streamed, of a model whose other weights have 8 bits; also where some are of high planes."""
    path = bundle_of(width, weights)
    whole = Engine.open(path, options=SHAPE, warm_up=False)
    memory = budget(whole, 6)
    whole.close()
    options = dataclasses.replace(SHAPE, memory_bytes=memory, experts=ExpertOptions(loss=loss))
    engine = Engine.open(path, options=options, warm_up=False)
    runner = engine.runner
    assert isinstance(runner, LayerwiseRunner)
    draws = np.random.default_rng(1)
    prompt, tokens = (draws.integers(0, CFG.vocab_size, NODES).tolist() for _ in range(2))
    runner.fill([*runner.request_buckets(len(prompt), 2 * NODES), *runner.tree_buckets(NODES)])
    _, cache = prefill_prompt(runner, runner.start(128), prompt, 0)
    together, _ = runner.tree_logits(line_tree(tokens), cache)
    _, cache = prefill_prompt(runner, runner.start(128), prompt, 0)
    alone = []
    for at, token in enumerate(tokens):
        # As decoding feeds it; a prompt of one token goes through a chunk.
        logits, cache = runner._feed(cache, [token], len(prompt) + at)
        alone.append(np.asarray(logits)[0])
    np.testing.assert_array_equal(together, np.stack(alone))
    engine.close()
