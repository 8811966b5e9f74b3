"""Programs of contexts' codecs: the bytes of the live service's codec, and contexts on a device in them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.contexts.codecs import WIDTHS, ChunkShape
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import ConfigError
from jaxllm.export.device.contexts import ProgramContext, ProgramContexts, encoded, loaded
from jaxllm.export.folder_format.signature import CHUNK_TOKENS, KEYS, VALUES, cache_shapes, chunk_format
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.kv.cache import Past
from jaxllm.kv.chunks import encode_chunks
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.models import CFG, CHUNKS, CONTEXT, exported

PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, cache_tokens=(32,))
GREEDY = GenerationConfig(max_tokens=6, ignore_eos=True)


def of_codec(kind, codec, elastic, place):
    plan = dataclasses.replace(PLAN, codec=codec)
    return exported(kind, read_subject(elastic), place / "programs", plan)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("stablehlo", "channel"), ("stablehlo", "kivi"), ("tflite", "channel"), ("tflite", "rotated")],
)
def test_programs_encode_and_load_as_the_live_codec(kind, codec, elastic, tmp_path):
    """To the byte, whatever the magnitudes of channels, in chunks that do not come in order."""
    engine = of_codec(kind, codec, elastic, tmp_path)
    runner, draw = engine.runner, np.random.default_rng(0)
    scales = (10.0 ** draw.integers(-4, 3, CFG.head_dim)).astype(np.float32)
    rows = {
        name: draw.standard_normal(shape).astype(np.float32) * scales
        for name, shape in cache_shapes(CFG, CONTEXT).items()
    }
    cache, form = runner.restored(rows, CONTEXT), chunk_format(codec)
    wanted_chunks = [3, 0, 2]
    for bits in WIDTHS:
        found = encoded(runner, cache, wanted_chunks, bits)
        encode = jax.jit(functools.partial(encode_chunks, form=form, bits=bits))
        at = np.array(wanted_chunks, np.int32)
        shape = ChunkShape(heads=CFG.kv_heads, tokens=CHUNK_TOKENS, width=CFG.head_dim)
        back = loaded(runner, runner.start(CONTEXT), {each: (bits, found[each]) for each in wanted_chunks})
        there = runner.rows(back, CONTEXT)
        for layer in range(CFG.layers):
            keys, values = (jnp.asarray(rows[name.format(layer)]) for name in (KEYS, VALUES))
            blobs = np.asarray(encode(Past(keys, values), at))
            decoded = form.codec.decode(jnp.asarray(blobs), shape, bits)
            for place, number in enumerate(wanted_chunks):
                assert (found[number][layer] == blobs[place]).all()
                part = slice(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
                for name, side in zip((KEYS, VALUES), decoded, strict=True):
                    got = there[name.format(layer)][0, :, part]
                    np.testing.assert_allclose(got, np.asarray(side[place]), rtol=1e-6, atol=1e-6)
            assert not there[KEYS.format(layer)][0, :, CHUNK_TOKENS : 2 * CHUNK_TOKENS].any()


@pytest.mark.parametrize("kind", ["stablehlo", "tflite"])
def test_a_context_at_few_bits_outlives_its_process(kind, elastic, tmp_path):
    engine = of_codec(kind, "channel", elastic, tmp_path)
    turns = [[(5 * i + 3) % CFG.vocab_size for i in range(34)], [9, 8, 7]]
    sizes, answers = {}, {}
    for bits in (0, 8, 4):
        place = tmp_path / f"store{bits}"
        contexts = ProgramContexts(engine, place, budget_bytes=1 << 20, bits=bits)
        name = contexts.create("app").name
        first = ProgramContext(contexts, contexts.record("app", name)).answer(turns[0], GREEDY)
        first.result()
        record = contexts.record("app", name)
        sizes[bits] = sum(sum(record.origin.layer_bytes[each]) for each in record.bits if each != LOST)
        contexts.close()
        again = ProgramContexts(engine, place, budget_bytes=1 << 20, bits=bits)
        answer = ProgramContext(again, again.record("app", name)).answer(turns[1], GREEDY).result()
        assert answer.restoration.read == (0, 1)
        answers[bits] = answer.tokens
        again.close()
    assert answers[8] == answers[0]
    assert sizes[4] < sizes[8] < sizes[0]
    # Two chunks; of each value 8 bits, and a low and a scale for each channel of 16 tokens.
    assert sizes[8] * 32 == sizes[0] * (8 + 2)


def test_what_a_folder_lacks_is_refused(elastic, tmp_path):
    engine = of_codec("stablehlo", "", elastic, tmp_path)
    with pytest.raises(ConfigError, match=r"no programs of contexts at 8 bits.*--codec"):
        ProgramContexts(engine, tmp_path / "store", budget_bytes=1 << 20, bits=8)
    with pytest.raises(ConfigError, match="no codec 'other'"):
        ExportPlan(codec="other")
