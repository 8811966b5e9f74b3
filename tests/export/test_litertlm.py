"""LiteRT-LM bundles, run by Google's own runtime."""

import pytest

from export.litertlm import export_litertlm, metadata
from export.signatures import ExportPlan
from export.subject import read_subject
from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from serving.engine import Engine
from serving.request import GenerationConfig
from tests.export.conftest import PLAN
from tests.export.models import CFG, CHUNKS, CONTEXT, OPTIONS, models_of

pytest.importorskip("litert_converter")
litert_lm = pytest.importorskip("litert_lm")
compiled_model = pytest.importorskip("ai_edge_litert.compiled_model")

TEXTS = ["the hello", "a longer text, of more than one chunk of sixteen tokens", "x"]


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def bundle(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "tiny.litertlm"
    export_litertlm(whole, path, ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS))
    return path


@pytest.fixture(scope="module")
def half(subject, tmp_path_factory):
    """Level 40, with its adapter, in programs that take a mask."""
    path = tmp_path_factory.mktemp("programs") / "half.litertlm"
    export_litertlm(subject, path, ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS, masked=True))
    return path


@pytest.mark.parametrize(("name", "level"), [("bundle", 100), ("half", 40)])
def test_the_runtime_writes_the_live_engines_text(request, name, level, elastic, tmp_path):
    bundle = request.getfixturevalue(name)
    live = Engine.open(elastic, options=OPTIONS, warm_up=False, level=level)
    config = GenerationConfig(max_tokens=8)
    runtime = litert_lm.Engine(
        str(bundle), backend=litert_lm.Backend.CPU(), max_num_tokens=CONTEXT, cache_dir=str(tmp_path)
    )
    for text in TEXTS:
        live.warm_up(prompt_tokens=len(live.tokenizer.encode(text)), max_tokens=8)
        session = runtime.create_session(
            sampler_config=litert_lm.SamplerConfig(top_k=1, temperature=0.0, seed=1),
            apply_prompt_template=False,
            max_output_tokens=8,
        )
        session.run_prefill([text])
        # Special tokens have a text there, and none here.
        found = session.run_decode().texts[0].replace("<|begin|>", "")
        assert found == live.generate(text, config).text


def test_what_the_runtime_is_told(whole):
    message, tokenizer = metadata(whole, ExportPlan(context_tokens=CONTEXT)), Tokenizer(whole.tokenizer)
    assert message.max_num_tokens == CONTEXT
    assert list(message.start_token.token_ids.ids) == [whole.tokenizer.bos_id]
    stops = [list(each.token_ids.ids) for each in message.stop_tokens]
    assert stops == [[each] for each in tokenizer.eos_ids]
    assert message.jinja_prompt_template == whole.tokenizer.chat_template


@pytest.mark.parametrize(("name", "taken"), [("bundle", []), ("half", ["mask"])])
def test_signatures_have_the_names_that_the_runtime_looks_for(request, name, taken, tmp_path):
    model = compiled_model.CompiledModel.from_buffer(model_of(request.getfixturevalue(name), tmp_path))
    found = model.get_signature_list()
    assert set(found) == {"prefill_16", "decode"}
    caches = [f"kv_cache_{side}_{layer}" for side in "kv" for layer in range(CFG.layers)]
    for signature, facts in found.items():
        assert sorted(facts["inputs"]) == sorted([*caches, "input_pos", "tokens", *taken])
        assert sorted(facts["outputs"]) == sorted([*caches, *(["logits"] if signature == "decode" else [])])


def model_of(path, folder):
    """The model in a file."""
    (found,) = models_of(path, folder)
    return found


def test_levels_and_trees_are_refused(elastic, whole, bundle, tmp_path):
    short = ExportPlan(context_tokens=CONTEXT, cache_tokens=(32,))
    several = read_subject(elastic, levels=(40, 70))
    for of, plan in ((several, ExportPlan(context_tokens=CONTEXT)), (whole, PLAN), (whole, short)):
        with pytest.raises(ConfigError, match="litertlm format holds no programs of --"):
            export_litertlm(of, tmp_path / "x.litertlm", plan)
    with pytest.raises(ConfigError, match="exists already"):
        export_litertlm(whole, bundle, ExportPlan(context_tokens=CONTEXT))
