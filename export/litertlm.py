"""Writes a `.litertlm` file for Google's LiteRT-LM runtime: the `.tflite` model, its tokenizer and end
tokens.

The runtime supports prefill and decode signatures of one model over caches of one length, so a file has no
token trees or short caches, and one level: another level is another file. For an NPU it has three models in
place of that one (see `npu.py`). It knows signatures by their names'
beginnings, and arguments by their names; where they take a `mask`, `[1, 1, T, S]` bool, it fills that.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export.contents import require_contents, require_family
from export.extras import require_format
from export.flatbuffer import Sharing
from export.npu import PREFILL_DECODE, npu_models
from export.quantized import left_out
from export.signatures import ExportPlan
from export.static_products import Ranges
from export.subject import Subject, only_level
from export.tflite import FILE, tflite_model
from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.program_folder.manifest import Precision
from serving.host.progress import Progress

SUFFIX = ".litertlm"
# For a model without a chat template: the contents of messages one after the other.
_PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] if m['content'] is string else m['content'][0]['text'] }}"
    "{% endfor %}"
)


def export_litertlm(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    precision: Precision = "f32",
    ranges: Mapping[int, Mapping[str, Ranges]] | None = None,
    progress: Progress | None = None,
) -> Sharing:
    """Writes a file that `litert-lm` runs (see `tflite.export_tflite` for the arguments).

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
    if out.exists():
        raise ConfigError(f"{out} exists already; remove it or name another output")
    plan = plan.resolved(subject.cfg)
    if plan.npu:
        _require_floats(plan, precision)
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
    return sharing


def metadata(subject: Subject, plan: ExportPlan) -> Any:
    """Facts about the model as the runtime's protocol buffer message."""
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    message, tokenizer = llm_metadata_pb2.LlmMetadata(), subject.tokenizer
    if tokenizer.bos_id is not None:
        message.start_token.token_ids.ids.append(tokenizer.bos_id)
    for each in tokenizer.eos_ids:
        message.stop_tokens.add().token_ids.ids.append(each)
    message.max_num_tokens = plan.context_tokens
    message.llm_model_type.generic_model.SetInParent()
    message.jinja_prompt_template = tokenizer.chat_template or _PLAIN_TEMPLATE
    message.supports_thinking = message.supports_function_calling = False
    return message


def _require_floats(plan: ExportPlan, precision: Precision) -> None:
    if precision != "f32" or plan.masked:
        raise ConfigError(
            "the models of an NPU are floats, which their compiler quantizes, and have masks of their own; "
            "leave --precision and --attention-mask out"
        )


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
