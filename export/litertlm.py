"""Writes a `.litertlm` file for Google's LiteRT-LM runtime: the `.tflite` model, its tokenizer and end
tokens.

The runtime supports prefill and decode signatures of one model over caches of one length, so a file has no
token trees or short caches, and one level: another level is another file. For an NPU it has three models in
place of that one (see `npu.py`). It finds signatures by prefixes of their names, and arguments by their
names; arguments named `mask`, `[1, 1, T, S]` bool, are filled by it.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.export.contents import require_contents, require_family
from jaxllm.export.extras import require_format
from jaxllm.export.flatbuffer import Sharing
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.litertlm_chat import require_same_chats, runtime_template
from jaxllm.export.npu import PREFILL_DECODE, npu_models
from jaxllm.export.quantized import left_out
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.static_products import Ranges
from jaxllm.export.subject import Subject, only_level
from jaxllm.export.tflite import FILE, tflite_model
from jaxllm.files.atomic import atomic_file
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

SUFFIX = ".litertlm"


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
