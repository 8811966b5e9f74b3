"""Tests the memory that a budget counts besides weights, against what buckets take."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxllm.experts.mixture import no_visits, tiles_and_weights
from jaxllm.experts.routing import Routing
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.weights.memory_plan import activation_bytes, outputs_bytes
from jaxllm.speculation.tree import new_tree
from jaxllm.steps.trees import settle
from tests.tiny import TINY

TREES = TreeShape(nodes=(8, 16), room=32, tips=2)


def resolved(cfg, **options):
    return EngineOptions(**options).resolve(cfg, quantized=True)


def test_the_logits_of_a_tree_are_counted():
    """Those that the graph takes which settles a tree, and what it computes of them."""
    cfg = dataclasses.replace(TINY, vocab_size=8192)
    tree = new_tree(jnp.int32(0), TREES.nodes[-1])
    logits = jax.ShapeDtypeStruct((TREES.nodes[-1], cfg.vocab_size), jnp.float32)
    graph = jax.jit(settle).lower(
        tree, logits, sampler_state(Sampling(), [], cfg.vocab_size, 0), jnp.int32(5)
    )
    takes = graph.compile().memory_analysis().temp_size_in_bytes + logits.size * 4
    plain, with_trees = (activation_bytes(cfg, resolved(cfg, trees=trees)) for trees in (None, TREES))
    one = 2 * cfg.vocab_size * 4
    # Beside the logits some arrays of nodes.
    assert takes - 65536 <= with_trees - plain + one <= 1.1 * takes


def test_a_draft_has_logits_of_its_tips_alone():
    cfg = dataclasses.replace(TINY, vocab_size=8192)
    options = resolved(cfg, trees=TREES)
    less = activation_bytes(cfg, options) - activation_bytes(cfg, options, drafts=True)
    assert less == 3 * (TREES.nodes[-1] - TREES.tips) * cfg.vocab_size * 4


@pytest.mark.parametrize(("experts", "choices"), [(128, 8), (8, 2), (64, 8), (8, 1)])
def test_what_experts_make_of_a_prompt_is_counted(experts, choices):
    """As many rows as the tables of streamed experts hold, a little more than there are pairs."""
    cfg = dataclasses.replace(
        TINY, model_type="qwen3_moe", qk_norm=True, attention_windows=(), experts=experts,
        experts_per_token=choices, expert_ffn_size=64, sparse_layers=(True, True), window_tokens=4096,
    )  # fmt: skip
    options = resolved(cfg, context_tokens=4096)
    chunk = options.chunk_tokens[-1]

    def visits():
        ids = jnp.zeros((1, chunk, choices), jnp.int32)
        routing = Routing(jnp.zeros((1, chunk, experts)), ids, jnp.zeros(ids.shape))
        tiles, _ = tiles_and_weights(routing, experts, live=jnp.ones(chunk, bool))
        return no_visits(jnp.zeros((chunk, cfg.hidden_size)), tiles)

    needed = 4096 // chunk * jax.eval_shape(visits).size * 4
    assert outputs_bytes(cfg, options) == needed
    assert needed <= 2 * 4096 * choices * cfg.hidden_size * 4
