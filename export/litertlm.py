"""Writes a `.litertlm` file for Google's LiteRT-LM runtime: the `.tflite` model, its tokenizer and end
tokens.

The runtime supports prefill and decode signatures of one model over caches of one length, so a file has no
token trees or short caches, and one level: another level is another file. For an NPU it has three models in
place of that one (see `npu.py`). It finds signatures by prefixes of their names, and arguments by their
names; arguments named `mask`, `[1, 1, T, S]` bool, are filled by it.

It passes every content of a chat as a list of parts, has no text for special tokens, keeps a template's last
newline, and puts the start token before the rendered text. With an adapted template a chat has the same
tokens as in the service.
"""

import contextlib
import dataclasses
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError, TemplateError, one_line
from jaxllm.export.contents import require_contents, require_family, require_format
from jaxllm.export.converter import Sharing
from jaxllm.export.folder import require_new
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.npu import PREFILL_DECODE, npu_models
from jaxllm.export.quantized import Ranges, left_out
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import Subject, only_level
from jaxllm.export.tflite import FILE, tflite_model
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

SUFFIX = ".litertlm"
# For a model without a chat template: the contents of messages one after the other.
_PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# Contents as texts. Parts of the runtime's own are texts and results of tools.
_TEXTS = """
{% if message.content is defined and message.content is sequence and message.content is not string %}
{% for part in message.content %}
{% if part is string %}{% set runtime.text = runtime.text + part %}
{% elif part.type == 'text' %}{% set runtime.text = runtime.text + part.text %}
{% elif part.type == 'tool_response' and part.response is string %}
{% set runtime.text = runtime.text + part.response %}
{% elif part.type == 'tool_response' %}{% set runtime.text = runtime.text + (part.response | tojson) %}
{% else %}{{ raise_exception('this model reads texts, not parts of the type ' ~ part.type) }}{% endif %}
{% endfor %}
{% set runtime.messages = runtime.messages + [dict(message, content=runtime.text)] %}
"""
# Contents as lists, for a template that only reads lists.
_PARTS = """
{% if message.content is string %}
{% set part = dict(type='text', text=message.content) %}
{% set runtime.messages = runtime.messages + [dict(message, content=[part])] %}
"""
_MESSAGES = """
{% set runtime = namespace(messages=[], text='') %}
{% for message in messages %}
{% set runtime.text = '' %}
CONTENTS
{% else %}{% set runtime.messages = runtime.messages + [message] %}{% endif %}
{% endfor %}
{% set messages = runtime.messages %}
"""
# Between block tags and the model's own template: tags would strip its first line's white space.
_EDGE = "{{ '' }}"
_WITHOUT_BOS = "{{ rendered[bos_token | length:] if rendered.startswith(bos_token) else rendered }}"
_SYSTEM = {"role": "system", "content": "Be brief."}
_TURNS = [
    {"role": "user", "content": "Is it raining?"},
    {"role": "assistant", "content": "Yes, since noon."},
    {"role": "user", "content": "Then I stay at home."},
]
_Turns = Sequence[Mapping[str, str]]


def export_litertlm(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    precision: Precision = "f32",
    ranges: Mapping[int, Mapping[str, Ranges]] | None = None,
    progress: Progress | None = None,
) -> Sharing:
    """Writes a file for `litert-lm` (see `tflite.export_tflite` for the arguments).

    Raises:
      ConfigError: the plan has several levels, token trees, blocks or short caches, or see `export_tflite`.
    """
    require_format("litertlm")
    levels = [each for each in subject.levels if each != WHOLE]
    require_contents("litertlm", plan, levels=len(levels), adapters=subject.adapters is not None)
    require_family("litertlm", precision, subject.cfg, levels=bool(levels))
    plan = dataclasses.replace(plan, cache_tokens=())
    level = levels[0] if levels else WHOLE
    # Ranges are of the level's products.
    ranges = None if ranges is None else {WHOLE: ranges[level]}
    if level != WHOLE and precision == "w8a8" and subject.calibration and not plan.without_shadow:
        raise ConfigError(
            f"a {SUFFIX} file of level {level} has no shadow; export it with --precision int8, or say "
            "--without-shadow and measure what it loses"
        )
    without = left_out(subject, precision, without_shadow=plan.without_shadow)
    subject = dataclasses.replace(only_level(subject, level), tiny_lm=None)
    require_new(out)
    plan = plan.resolved(subject.cfg)
    if plan.npu:
        if precision != "f32" or plan.masked:
            raise ConfigError(
                "the models of an NPU are floats, which their compiler quantizes, and have masks of their "
                "own; leave --precision and --attention-mask out"
            )
        models, sharing = npu_models(subject, plan, progress)
    else:
        signatures = plan.signatures(WHOLE, lambda _: FILE)
        model, sharing = tflite_model(
            subject, plan, signatures, precision=precision, ranges=ranges, progress=progress
        )
        models = {PREFILL_DECODE: model}
    with tempfile.TemporaryDirectory() as folder, atomic_file(out) as file:
        tokenizer_path, facts_path = (Path(folder) / name for name in ("t.json", "facts.pb"))
        for kind, model in models.items():
            (Path(folder) / kind).write_bytes(model)
        tokenizer_path.write_text(subject.tokenizer.tokenizer_json, encoding="utf-8")
        facts_path.write_bytes(metadata(subject, plan).SerializeToString())
        _build(file, [Path(folder) / each for each in models], tokenizer_path, facts_path, without)
        if not plan.npu:
            # The runtime only opens names with this suffix, and an NPU's models only on an NPU.
            file.flush()
            tried = Path(folder) / f"tried{SUFFIX}"
            tried.symlink_to(Path(file.name).absolute())
            require_same_chats(tried, Tokenizer(subject.tokenizer))
    return sharing


def metadata(subject: Subject, plan: ExportPlan) -> Any:
    """Facts about the model as the runtime's protocol buffer message."""
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    message, tokenizer = llm_metadata_pb2.LlmMetadata(), Tokenizer(subject.tokenizer)
    if tokenizer.adds_bos:
        # The runtime adds no token by the tokenizer's own rules.
        message.start_token.token_ids.ids.append(tokenizer.bos_id)
    for each in tokenizer.eos_ids:
        message.stop_tokens.add().token_ids.ids.append(each)
    message.max_num_tokens = plan.context_tokens
    _advise(message.sampler_params, subject)
    message.llm_model_type.generic_model.SetInParent()
    message.jinja_prompt_template = runtime_template(tokenizer)
    message.supports_thinking = message.supports_function_calling = False
    return message


def _advise(params: Any, subject: Subject) -> None:
    """Writes the sampling that the model's authors recommend, as far as the runtime supports it: it has no
    min-p and no penalties. Its top-p considers at most `k` tokens, hence `k` is all tokens without a
    top-k."""
    sampling = subject.tokenizer.sampling
    if not sampling:
        return
    if sampling.get("temperature") == 0:
        params.type = params.GREEDY
        return
    params.type = params.TOP_P
    params.temperature = sampling.get("temperature", 1.0)
    params.k = int(sampling.get("top_k", 0)) or subject.cfg.vocab_size
    params.p = sampling.get("top_p", 1.0)


def _build(file: Any, models: Sequence[Path], tokenizer: Path, facts: Path, without: Sequence[str]) -> None:
    from litert_lm_builder import litertlm_builder as library

    builder = library.LitertLmFileBuilder()
    builder.add_system_metadata(library.Metadata(key="Authors", value="jaxllm", dtype=library.DType.STRING))
    for each in without:
        builder.add_system_metadata(library.Metadata(key="Without", value=each, dtype=library.DType.STRING))
    builder.add_llm_metadata(str(facts))
    for each in models:
        builder.add_tflite_model(str(each), library.TfLiteModelType[each.name])
    builder.add_hf_tokenizer(str(tokenizer))
    builder.build(file, validate_metadata=True)


def runtime_template(tokenizer: Tokenizer) -> str:
    """The chat template of a `.litertlm` file with this tokenizer."""
    # Jinja drops one newline at a template's end.
    source = _EDGE + (tokenizer.chat_template or _PLAIN).removesuffix("\n")
    if _bos_text(tokenizer):
        source = f"{{% set rendered %}}{source}{_EDGE}{{% endset %}}{_WITHOUT_BOS}"
    named = "".join(
        f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}"
        for name, text in tokenizer.files.special.items()
        if name.isidentifier()
    )
    contents = _PARTS if tokenizer.chat_reads_parts_alone else _TEXTS
    return (named + _MESSAGES.replace("CONTENTS", contents)).replace("\n", "") + source


def require_same_chats(bundle: Path, tokenizer: Tokenizer) -> None:
    """Opens a file by the runtime, and compares its rendered chats with the service's.

    Raises:
      ConfigError: the runtime does not open it, cannot render a chat, or renders another text.
      TemplateError: the service cannot render a chat either.
    """
    now = datetime.datetime.now()
    chats = [_TURNS[:1]]
    for turns in (_TURNS, [_SYSTEM, *_TURNS]):
        # Some templates refuse a system's turn, or any but one question.
        with contextlib.suppress(TemplateError):
            _service_text(turns, tokenizer, now)
            chats.append(turns)
    for turns, found in zip(chats, _runtime_texts(bundle, chats), strict=True):
        wanted = _service_text(turns, tokenizer, now)
        if found != wanted:
            how = f"renders a chat as {found!r:.200}" if found else "cannot render a chat (its log says why)"
            raise ConfigError(
                f"by the model's chat template LiteRT-LM {how}, the service renders {wanted!r:.200}; prepare "
                "the model again with a template that both render alike"
            )


def _bos_text(tokenizer: Tokenizer) -> str:
    return tokenizer.files.special.get("bos_token", "") if tokenizer.adds_bos else ""


def _service_text(turns: _Turns, tokenizer: Tokenizer, now: datetime.datetime) -> str:
    """Returns the text after the start token in the service's prompt."""
    if not tokenizer.has_chat_template:
        return "".join(turn["content"] for turn in turns)
    return tokenizer.render_chat(turns, now=now).removeprefix(_bos_text(tokenizer))


def _runtime_texts(bundle: Path, chats: Sequence[_Turns]) -> list[str]:
    """Returns the texts that the runtime renders; empty if it fails, with the reason in its log."""
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine = litert_lm.Engine(str(bundle), backend=litert_lm.Backend.CPU(), cache_dir=folder)
            return [
                engine.create_conversation(messages=earlier).render_message_to_string(last)
                for *earlier, last in chats
            ]
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"LiteRT-LM does not open the model: {one_line(error)}") from error
