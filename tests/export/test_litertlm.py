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
from tests.export.models import CHUNKS, CONTEXT, OPTIONS

pytest.importorskip("litert_converter")
litert_lm = pytest.importorskip("litert_lm")

TEXTS = ["the hello", "a longer text, of more than one chunk of sixteen tokens", "x"]


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def bundle(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "tiny.litertlm"
    export_litertlm(whole, path, ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS))
    return path


def test_the_runtime_writes_the_live_engines_text(bundle, elastic, tmp_path):
    live = Engine.open(elastic, options=OPTIONS, warm_up=False)
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
        assert session.run_decode().texts[0] == live.generate(text, config).text


def test_what_the_runtime_is_told(whole):
    message, tokenizer = metadata(whole, ExportPlan(context_tokens=CONTEXT)), Tokenizer(whole.tokenizer)
    assert message.max_num_tokens == CONTEXT
    assert list(message.start_token.token_ids.ids) == [whole.tokenizer.bos_id]
    stops = [list(each.token_ids.ids) for each in message.stop_tokens]
    assert stops == [[each] for each in tokenizer.eos_ids]
    assert message.jinja_prompt_template == whole.tokenizer.chat_template


def test_levels_and_trees_are_refused(subject, whole, bundle, tmp_path):
    short = ExportPlan(context_tokens=CONTEXT, cache_tokens=(32,))
    for of, plan in ((subject, ExportPlan(context_tokens=CONTEXT)), (whole, PLAN), (whole, short)):
        with pytest.raises(ConfigError, match="litertlm format holds no programs of --"):
            export_litertlm(of, tmp_path / "x.litertlm", plan)
    with pytest.raises(ConfigError, match="exists already"):
        export_litertlm(whole, bundle, ExportPlan(context_tokens=CONTEXT))
