"""The three models of an NPU in a LiteRT-LM file: their names and shapes, and what they answer together on a
CPU."""

import dataclasses

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError
from jaxllm.export.litertlm import _parts, export_litertlm, require_divisible
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.compiled import ran
from tests.export.models import CFG, CHUNKS, CONTEXT, OPTIONS, PROMPTS, models_of

pytest.importorskip("litert_converter")
pytest.importorskip("litert_lm_builder")
compiled_model = pytest.importorskip("ai_edge_litert.compiled_model")

(CHUNK,) = CHUNKS
PLAN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, npu=True)


@pytest.fixture(scope="module")
def models(elastic, tmp_path_factory):
    """The opened models by their signatures."""
    place = tmp_path_factory.mktemp("npu")
    export_litertlm(read_subject(elastic), place / "npu.litertlm", PLAN)
    opened = [
        compiled_model.CompiledModel.from_buffer(each) for each in models_of(place / "npu.litertlm", place)
    ]
    return {name: each for each in opened for name in each.get_signature_list()}


def test_signatures_have_the_names_that_the_runtime_looks_for(models):
    assert set(models) == {
        "prefill_embedder_16", "decode_embedder", "prefill_mask_16", "decode_mask", "prefill_rope_16",
        "decode_rope", "prefill_cache_update_16", "decode_cache_update", "prefill_16", "decode",
    }  # fmt: skip
    for name, tokens in (("prefill_16", CHUNK), ("decode", 1)):
        facts = models[name].get_signature_list()[name]
        slices = {f"kv_slice_{side}_{layer}" for side in "kv" for layer in range(CFG.layers)}
        assert set(facts["outputs"]) == slices | ({"logits"} if tokens == 1 else set())
        details = models[name].get_output_tensor_details(name)
        heads, width = CFG.kv_heads, CFG.head_dim
        assert tuple(details["kv_slice_k_0"]["shape"]) == (1, heads, tokens, width)
        assert tuple(details["kv_slice_v_0"]["shape"]) == (1, heads, width, tokens)


def test_together_they_answer_as_the_live_engine(models, elastic):
    live = Engine.open(elastic, options=OPTIONS)
    # Two chunks, one of them padded, and one token.
    prompt, tokens = PROMPTS[3], 8
    wanted = live.generate(prompt, GenerationConfig(max_tokens=tokens, ignore_eos=True)).tokens
    (shapes,) = (each for _, part, _, each in _parts(CFG, PLAN) if part == "decode")
    caches = {name: np.zeros(each.shape, each.dtype) for name, each in shapes.items() if "cache" in name}

    def fed(kind, suffix, part, at):
        nonlocal caches
        count = int(suffix[1:] or 1)
        row, position = np.zeros((1, count), np.int32), np.full(count, -1, np.int32)
        row[0, : len(part)], position[: len(part)] = part, np.arange(at, at + len(part))
        given = {
            **ran(models, f"{kind}_embedder{suffix}", {"token_ids": row}),
            **ran(models, f"{kind}_rope{suffix}", {"input_pos": position}),
            **ran(
                models,
                f"{kind}_mask{suffix}",
                {"time_step": np.array([at], np.int32), "input_tokens": row},
            ),
            **caches,
        }
        out = ran(models, f"{kind}{suffix}", given)
        logits = out.pop("logits", None)
        caches = ran(models, f"{kind}_cache_update{suffix}", {"input_pos": position, **caches, **out})
        return logits

    for at in range(0, len(prompt) - 1, CHUNK):
        fed("prefill", f"_{CHUNK}", prompt[at : min(at + CHUNK, len(prompt) - 1)], at)
    said = [*prompt[-1:]]
    for index in range(tokens):
        logits = fed("decode", "", said[-1:], len(prompt) - 1 + index)
        said.append(int(logits[0, -1].argmax()))
    assert said[1:] == list(wanted)


def test_what_cannot_be_divided_is_refused(elastic, tmp_path):
    subject = read_subject(elastic)
    with pytest.raises(ConfigError, match="one length of chunks"):
        export_litertlm(subject, tmp_path / "x", dataclasses.replace(PLAN, chunk_tokens=(16, 32)))
    with pytest.raises(ConfigError, match="which their compiler quantizes"):
        export_litertlm(subject, tmp_path / "x", PLAN, precision="int8")
    learned = dataclasses.replace(CFG, rope=None, learned_positions=True)
    with pytest.raises(ConfigError, match="positions that are no rotation"):
        require_divisible(learned)
