"""LiteRT-LM bundles, run by Google's own runtime."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import Engine
from jaxllm.errors import ConfigError, TemplateError
from jaxllm.export.litertlm import export_litertlm, metadata, runtime_template
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.text.template_program import TemplateProgram
from jaxllm.text.tokenizer import Tokenizer
from tests.export.conftest import PLAN
from tests.export.models import CFG, CHUNKS, CONTEXT, OPTIONS, models_of
from tests.tiny import tiny_tokenizer, write_tiny_bundle

pytest.importorskip("litert_converter")
litert_lm = pytest.importorskip("litert_lm")
compiled_model = pytest.importorskip("ai_edge_litert.compiled_model")

PLAIN = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS)
TEXTS = ["the hello", "a longer text, of more than one chunk of sixteen tokens", "x"]


@pytest.fixture(scope="module")
def whole(elastic):
    return read_subject(elastic)


@pytest.fixture(scope="module")
def bundle(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "tiny.litertlm"
    export_litertlm(whole, path, PLAIN)
    return path


@pytest.fixture(scope="module")
def half(subject, tmp_path_factory):
    """Level 40, with its adapter, in programs that take a mask."""
    path = tmp_path_factory.mktemp("programs") / "half.litertlm"
    export_litertlm(subject, path, dataclasses.replace(PLAIN, masked=True))
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


def test_the_runtimes_own_command_answers(bundle, tmp_path):
    command = [Path(sys.executable).with_name("litert-lm"), "run", bundle, "--prompt", "the hello"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert b"template" not in done.stdout + done.stderr


# Chat templates as LiteRT-LM renders them: what the service renders

BARE = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
# The kinds of templates that models are published with.
TEMPLATES = {
    "plain": BARE,
    "lines": (
        "\n  {% for m in messages %}\n{{ m.role }}: {{ m.content | trim }}\n  {% endfor %}\n"
        "{% if true %}\n end\n{% endif %}\n"
    ),
    "first token": "{{ bos_token }}"
    + BARE
    + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "first token spelled": "<|begin|>" + BARE,
    "first token of each turn": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '. ' %}"
        "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}"
        "{{ system if loop.first else '' }}{% endif %}"
        "{{ m.content + eos_token }}{% endfor %}"
    ),
    "no system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + BARE,
    "tools": "{% if tools is not none and tools is defined %}{{ tools | tojson }}{% endif %}" + BARE,
    "texts or parts": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }} of parts{% endfor %}{% endif %}{% endfor %}"
    ),
    "parts": (
        "{% set seen = namespace(images=0) %}{% macro shown(parts) %}{% for part in parts %}"
        "{% if part.type == 'image' %}{% set seen.images = seen.images + 1 %}{{ seen.images }}"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endmacro %}"
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ shown(m.content) }}{% endfor %}"
    ),
}
TURNS = [
    {"role": "system", "content": "Brief!"},
    {"role": "user", "content": " Is 'it' raining?\n"},
    {"role": "assistant", "content": 'Yes, "since" noon.'},
    {"role": "user", "content": "So? é"},
]


def tokenizer_of(template, *, adds_bos=True):
    """The tiny tokenizer, which names its first token, and may add it or not."""
    files = tiny_tokenizer()
    data = json.loads(files.tokenizer_json)
    data["post_processor"] = data["post_processor"] if adds_bos else None
    return Tokenizer(dataclasses.replace(files, tokenizer_json=json.dumps(data), chat_template=template))


def chats_of(tokenizer):
    """Conversations that the service renders, and what follows the start token there."""
    bos = "<|begin|>" if tokenizer.adds_bos else ""
    found = {}
    for turns in (TURNS, TURNS[1:], TURNS[1:2]):
        with contextlib.suppress(TemplateError):
            found[tokenizer.render_chat(turns).removeprefix(bos)] = turns
    return found


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_runtime_renders_what_the_service_renders(runtime, name, adds_bos):
    tokenizer = tokenizer_of(TEMPLATES[name], adds_bos=adds_bos)
    for wanted, turns in chats_of(tokenizer).items():
        chat = runtime.create_conversation(messages=turns[:-1], chat_template=runtime_template(tokenizer))
        assert chat.render_message_to_string(turns[-1]) == wanted


def test_a_model_without_a_template_gets_the_contents_and_parts_must_be_texts():
    program = TemplateProgram(runtime_template(tokenizer_of(None)))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert program.run({"messages": messages}, None) == "abc"
    program = TemplateProgram(runtime_template(tokenizer_of(BARE)))

    def rendered(part):
        return program.run({"messages": [{"role": "tool", "content": [part]}]}, None)

    assert rendered({"type": "tool_response", "name": "f", "response": "12"}) == "<|tool|>12"
    assert rendered({"type": "tool_response", "name": "f", "response": {"x": 1}}) == '<|tool|>{"x": 1}'
    with pytest.raises(TemplateError, match="this model reads texts, not parts of the type image"):
        rendered({"type": "image", "path": "x.png"})


def test_templates_that_the_runtime_renders_otherwise_are_refused(whole, tmp_path):
    for expression, said in (
        ("m.get('content')", "LiteRT-LM cannot render a chat"),
        ("loop.first }}{{ m.content", "renders a chat as 'true.*service renders 'True"),
    ):
        template = f"{{% for m in messages %}}{{{{ {expression} }}}}{{% endfor %}}"
        subject = dataclasses.replace(whole, tokenizer=tokenizer_of(template).files)
        with pytest.raises(ConfigError, match=said):
            export_litertlm(subject, tmp_path / "x.litertlm", PLAIN)
    assert not list(tmp_path.iterdir())


def test_a_first_token_that_is_named_and_not_added(tmp_path, monkeypatch):
    """As in Qwen's and Granite's tokenizers: the runtime adds none either."""
    tokenizer = tokenizer_of(None, adds_bos=False).files
    stored = write_tiny_bundle(tmp_path / "t.jaxllm", cfg=CFG, tokenizer=tokenizer)
    subject = read_subject(stored)
    assert not metadata(subject, PLAIN).HasField("start_token")
    # By a path as the command gets it.
    monkeypatch.chdir(tmp_path)
    export_litertlm(subject, Path("t.litertlm"), PLAIN)
    options = dataclasses.replace(OPTIONS, levels=())
    assert_same_texts(tmp_path / "t.litertlm", Engine.open(stored, options=options, warm_up=False), tmp_path)


def test_what_the_runtime_is_given_and_advised(whole):
    message, tokenizer = metadata(whole, PLAIN), Tokenizer(whole.tokenizer)
    assert message.max_num_tokens == CONTEXT
    assert list(message.start_token.token_ids.ids) == [whole.tokenizer.bos_id]
    stops = [list(each.token_ids.ids) for each in message.stop_tokens]
    assert stops == [[each] for each in tokenizer.eos_ids]
    assert message.jinja_prompt_template == runtime_template(tokenizer)
    for sampling, kind, wanted in (
        ({}, "", (0, 0, 0)),
        ({"temperature": 0.0, "top_k": 5}, "GREEDY", (0, 0, 0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, "TOP_P", (20, 0.95, 0.6)),
        ({"temperature": 0.6}, "TOP_P", (CFG.vocab_size, 1.0, 0.6)),
    ):
        files = dataclasses.replace(whole.tokenizer, sampling=sampling)
        found = metadata(dataclasses.replace(whole, tokenizer=files), PLAIN).sampler_params
        assert found.type == (found.Type.Value(kind) if kind else 0)
        assert (found.k, found.p, found.temperature) == pytest.approx(wanted)


@pytest.mark.parametrize(("name", "taken"), [("bundle", []), ("half", ["mask"])])
def test_signatures_have_the_names_that_the_runtime_looks_for(request, name, taken, tmp_path):
    (model,) = models_of(request.getfixturevalue(name), tmp_path)
    found = compiled_model.CompiledModel.from_buffer(model).get_signature_list()
    assert set(found) == {"prefill_16", "decode"}
    caches = [f"kv_cache_{side}_{layer}" for side in "kv" for layer in range(CFG.layers)]
    for signature, facts in found.items():
        assert sorted(facts["inputs"]) == sorted([*caches, "input_pos", "tokens", *taken])
        assert sorted(facts["outputs"]) == sorted([*caches, *(["logits"] if signature == "decode" else [])])


def test_levels_and_trees_are_refused(elastic, whole, bundle, tmp_path):
    for of, plan in ((read_subject(elastic, levels=(40, 70)), PLAIN), (whole, PLAN)):
        with pytest.raises(ConfigError, match="litertlm format holds no programs of --"):
            export_litertlm(of, tmp_path / "x.litertlm", plan)
    with pytest.raises(ConfigError, match="exists already"):
        export_litertlm(whole, bundle, PLAIN)
