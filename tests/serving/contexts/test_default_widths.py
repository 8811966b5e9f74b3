"""Stores chunks as services do where no codec is named: which widths density chooses at the default ratio."""

from collections import Counter

import numpy as np
import pytest

from jaxllm.contexts.codecs import WIDTHS, ChunkFormat, ChunkShape
from jaxllm.contexts.tolerance import allocate
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.ground.bundles import find_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.server.service import CODEC_CHUNK_TOKENS, engine_options

TOKENS = 768


def widths(chunk_tokens: int, ratio: float, density: np.ndarray) -> Counter[int]:
    """How many chunks have each width, of a density at each token."""
    shape = ChunkShape(heads=2, tokens=chunk_tokens, width=16)
    sizes = {bits: ChunkFormat.named("channel", chunk_tokens).sizes(shape)[bits] for bits in WIDTHS}
    chunks = density.reshape(-1, chunk_tokens).mean(1)
    budget = int(ratio * shape.reference_bytes * len(chunks) + 1e-6)
    found = allocate(chunks, budget, sizes=sizes)
    assert sum(sizes[bits] for bits in found.tolist()) <= budget
    # Whatever the widths, a denser chunk has no fewer bits than a sparser one (the newest counts as densest).
    order = np.argsort(chunks[:-1])
    assert (np.diff(found[:-1][order]) >= 0).all()
    return Counter(found.tolist())


@pytest.fixture
def density():
    """Of 768 tokens of which the first ones and the newest ones are attended to most."""
    at = np.arange(TOKENS)
    return 1 + 60 * np.exp(-at / 4) + 5 * np.exp((at - TOKENS) / 40)


def test_density_decides_at_the_default_ratio(density):
    ratio = ContextOptions(folder="").ratio
    # In chunks as short as LLMS's the ratio is that of 4 bits, whatever the density.
    assert widths(16, ratio, density) == {4: 48}
    assert widths(CODEC_CHUNK_TOKENS, ratio, density) == {8: 6, 4: 18}
    # A chunk at 8 bits in place of 4 pays where it is some 48 times as dense per byte as one that has 2 bits
    # for it; then there are all three.
    steep = np.where(np.arange(TOKENS) < CODEC_CHUNK_TOKENS, 400.0, density)
    assert sorted(widths(CODEC_CHUNK_TOKENS, 0.45, steep)) == [2, 4, 8]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        (EngineOptions(), CODEC_CHUNK_TOKENS),
        (EngineOptions(kv_chunk_tokens=64), 64),
        # Who names the codec names all of it.
        (EngineOptions(kv_codec="channel"), 16),
        # Too few chunks to choose between, and prefills that cannot compute a chunk again.
        (EngineOptions(context_tokens=255), 16),
        (EngineOptions(context_tokens=256), CODEC_CHUNK_TOKENS),
        (EngineOptions(chunk_tokens=(16,)), 16),
        (EngineOptions(chunk_tokens=(16, 64)), CODEC_CHUNK_TOKENS),
    ],
)
def test_services_share_scales_among_more_tokens(asked, tokens, tmp_path):
    chosen = engine_options(find_model("draft"), (), asked, ContextOptions(folder=tmp_path))
    assert (chosen.kv_codec, chosen.kv_chunk_tokens) == ("channel", tokens)


def test_without_contexts_nothing_is_chosen():
    chosen = engine_options(find_model("draft"), (), EngineOptions(), None)
    assert (chosen.kv_codec, chosen.kv_chunk_tokens) == ("", EngineOptions.kv_chunk_tokens)
