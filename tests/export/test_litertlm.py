"""LiteRT-LM bundles, run by Google's own runtime."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError
from jaxllm.export.litertlm import export_litertlm, metadata, runtime_template
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.text.tokenizer import Tokenizer
from tests.export.conftest import PLAN
from tests.export.models import CFG, CHUNKS, CONTEXT, OPTIONS, models_of
from tests.export.test_litertlm_chat import TEMPLATES, chats_of, tokenizer_of
from tests.tiny import write_tiny_bundle

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
    live = Engine.open(elastic, options=OPTIONS, warm_up=False, level=level)
    assert_same_texts(request.getfixturevalue(name), live, tmp_path)


def assert_same_texts(bundle, live, tmp_path):
    """What the runtime generates in a raw session is the live engine's text."""
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


@pytest.fixture(scope="module")
def runtime(bundle, tmp_path_factory):
    return litert_lm.Engine(
        str(bundle), backend=litert_lm.Backend.CPU(), max_num_tokens=CONTEXT,
        cache_dir=str(tmp_path_factory.mktemp("runtime")),
    )  # fmt: skip


@pytest.mark.parametrize(
    "turns",
    [["the hello"], ["x", "yes", "a longer text of more than sixteen tokens"]],
    ids=["first turn", "later turn"],
)
def test_conversations_have_the_services_answers(runtime, elastic, turns):
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    live = Engine.open(elastic, options=OPTIONS, warm_up=False)
    live.warm_up(prompt_tokens=len(live.tokenizer.encode_chat(messages)), max_tokens=8)
    wanted = live.chat(messages, GenerationConfig(max_tokens=8)).result().text
    for last in (turns[-1], messages[-1], {"role": "user", "content": [{"type": "text", "text": turns[-1]}]}):
        chat = runtime.create_conversation(
            messages=messages[:-1],
            sampler_config=litert_lm.SamplerConfig(top_k=1, temperature=0.0, seed=1),
            max_output_tokens=8,
        )
        (answer,) = chat.send_message(last).contents
        # Special tokens have a text there, and none here.
        assert answer.text.replace("<|begin|>", "") == wanted


def test_the_runtimes_own_command_answers(bundle, tmp_path):
    command = [Path(sys.executable).with_name("litert-lm"), "run", bundle, "--prompt", "the hello"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert b"template" not in done.stdout + done.stderr


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_runtime_renders_what_the_service_renders(runtime, name, adds_bos):
    tokenizer = tokenizer_of(TEMPLATES[name], adds_bos=adds_bos)
    for wanted, turns in chats_of(tokenizer).items():
        chat = runtime.create_conversation(messages=turns[:-1], chat_template=runtime_template(tokenizer))
        assert chat.render_message_to_string(turns[-1]) == wanted


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.get('content') }}{% endfor %}", "LiteRT-LM cannot render a chat"),
        (
            "{% for m in messages %}{{ loop.first }}{{ m.content }}{% endfor %}",
            "renders a chat as 'true.*service renders 'True",
        ),
    ],
)
def test_templates_that_the_runtime_renders_otherwise_are_refused(whole, template, said, tmp_path):
    subject = dataclasses.replace(whole, tokenizer=tokenizer_of(template).files)
    with pytest.raises(ConfigError, match=said):
        export_litertlm(
            subject, tmp_path / "x.litertlm", ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS)
        )
    assert not list(tmp_path.iterdir())


def test_a_first_token_that_is_named_and_not_added(tmp_path, monkeypatch):
    """As in Qwen's and Granite's tokenizers: the runtime adds none either."""
    tokenizer = tokenizer_of(None, adds_bos=False).files
    stored = write_tiny_bundle(tmp_path / "t.jaxllm", cfg=CFG, tokenizer=tokenizer)
    plan, subject = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS), read_subject(stored)
    assert not metadata(subject, plan).HasField("start_token")
    # By a path as the command gets it.
    monkeypatch.chdir(tmp_path)
    export_litertlm(subject, Path("t.litertlm"), plan)
    options = dataclasses.replace(OPTIONS, levels=())
    assert_same_texts(tmp_path / "t.litertlm", Engine.open(stored, options=options, warm_up=False), tmp_path)


def test_what_the_runtime_is_told(whole):
    message, tokenizer = metadata(whole, ExportPlan(context_tokens=CONTEXT)), Tokenizer(whole.tokenizer)
    assert message.max_num_tokens == CONTEXT
    assert list(message.start_token.token_ids.ids) == [whole.tokenizer.bos_id]
    stops = [list(each.token_ids.ids) for each in message.stop_tokens]
    assert stops == [[each] for each in tokenizer.eos_ids]
    assert message.jinja_prompt_template == runtime_template(tokenizer)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, (0, 0, 0)),
        ({"temperature": 0.0, "top_k": 5}, ("GREEDY", 0, 0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, ("TOP_P", 20, 0.95)),
        ({"temperature": 0.6}, ("TOP_P", CFG.vocab_size, 1.0)),
    ],
)
def test_the_runtime_is_told_what_the_authors_advise(whole, sampling, expected):
    advised = dataclasses.replace(whole, tokenizer=dataclasses.replace(whole.tokenizer, sampling=sampling))
    found = metadata(advised, ExportPlan(context_tokens=CONTEXT)).sampler_params
    kind, k, p = expected
    assert found.type == (found.Type.Value(kind) if kind else 0)
    assert (found.k, found.p, found.temperature) == (
        k, pytest.approx(p), pytest.approx(0.6 if kind == "TOP_P" else 0)
    )  # fmt: skip


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
