"""Every architecture gives transformers' logits: whole, in two chunks cut anywhere, and token by token.

Whole, every variant does daily, as each has names and options of its own; in parts, one of each mechanism of
layers with a cache, and the others in campaigns.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.kv.cache import new_cache
from jaxllm.models import decoder
from jaxllm.models.architectures import ARCHITECTURES

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests import tiny_hf
from tests.quick_jit import jit

TOLERANCE = 1e-3
BATCH, PROMPT = 2, 13
# Not a multiple of the chunk, so a padded chunk reaches past the cache's end.
CAPACITY = 16
MECHANISMS = (
    "llama", "gemma2", "exaone4", "qwen3_moe-some-dense", "gpt_oss", "ministral3", "opt", "lfm2",
    "qwen3_5_text", "gemma4_text",
)  # fmt: skip


@pytest.fixture(scope="module", params=list(tiny_hf.VARIANTS))
def case(request, tmp_path_factory):
    """(config, our parameters, prompt, transformers' logits of it) of one variant."""
    folder = tiny_hf.save(request.param, tmp_path_factory.mktemp("tiny"))
    cfg = read_config(folder)
    params = {name: jnp.asarray(value) for name, value in read_params(folder, cfg)}
    tokens = np.random.default_rng(1).integers(0, tiny_hf.VOCAB, (BATCH, PROMPT), dtype=np.int32)
    expected = tiny_hf.logits(tiny_hf.load(folder), tokens)
    # Logits near zero would agree with anything.
    assert expected.std() > 0.3
    return cfg, params, tokens, expected


def test_whole_prompt_without_cache(case):
    cfg, params, tokens, expected = case

    @jit
    def whole(params, tokens):
        hidden, cache = decoder.forward(params, tokens, cfg=cfg)
        assert cache is None
        return decoder.logits(params, hidden, cfg=cfg)

    got = np.asarray(whole(params, tokens))
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in MECHANISMS else pytest.mark.campaign)
        for name in tiny_hf.VARIANTS
    ],
    indirect=True,
)
def test_two_padded_chunks_at_every_split_and_single_tokens(case):
    cfg, params, tokens, expected = case
    empty = new_cache(cfg, batch=BATCH, tokens=CAPACITY, dtype=jnp.float32)

    @jit
    def step(params, tokens, cache, valid):
        hidden, cache = decoder.forward(params, tokens, cache, cfg=cfg, valid=valid)
        return decoder.logits(params, hidden, cfg=cfg), cache

    # Padding holds real ids, so that reading it by mistake changes the answer.
    padded = np.concatenate([tokens, tokens[:, ::-1]], axis=1)
    for split in range(1, PROMPT):
        first, cache = step(params, padded[:, :PROMPT], empty, np.int32(split))
        rest = padded[:, split : split + PROMPT]
        second, cache = step(params, rest, cache, np.int32(PROMPT - split))
        got = np.concatenate([first[:, :split], second[:, : PROMPT - split]], axis=1)
        assert np.abs(got - expected).max() < TOLERANCE, f"split at {split}"
        assert int(cache.length) == PROMPT
    cache = empty
    for position in range(PROMPT):
        got, cache = step(params, tokens[:, position : position + 1], cache, np.int32(1))
        assert np.abs(got[:, 0] - expected[:, position]).max() < TOLERANCE, f"position {position}"


def test_every_architecture_has_a_variant():
    alone = {name for name, each in ARCHITECTURES.items() if not each.encoder_tensors}
    plain = {name for name in tiny_hf.VARIANTS if "-" not in name}
    assert alone == {"gemma3_text" if name == "gemma3" else name for name in plain}
