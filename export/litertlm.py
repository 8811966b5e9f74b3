"""Writes a `.litertlm` file for Google's LiteRT-LM runtime: the `.tflite` model, its tokenizer and end
tokens.

The runtime supports prefill and decode signatures of one model over caches of one length, so a file has no
token trees or short caches, and one level: another level is another file. It finds signatures by prefixes of
their names, and arguments by their names; arguments named `mask`, `[1, 1, T, S]` bool, are filled by it.

It passes every content of a chat as a list of parts, has no text for special tokens, keeps a template's last
newline, and puts the start token before the rendered text. With an adapted template a chat has the same
tokens as in the service.

For an NPU a file has three models in place of that one, in floats. `EMBEDDER` looks tokens up; `AUX` makes
masks and angles, and writes slices into caches; `PREFILL_DECODE` runs on the NPU. A vendor's plugin then
quantizes the last one and compiles it for one SoC, which requires the vendor's SDK. In floats all three run
on a CPU, too.

The NPU's part has no tokens, positions or caches to write, because NPUs are slow at look-ups, scatters and
trigonometry. Its inputs are `embeddings` `[1, T, D]`, the angles `pos_emb_cos`, `pos_emb_sin` `[1, 1, T,
R]` (and `pos_emb_local_cos`, `pos_emb_local_sin` of layers with a window that have a rotary embedding of
their own), `mask_global` and `mask_local` `[1, 1, T, S + T]` bool, True = attend, over the cache followed
by the new tokens, and the caches `kv_cache_k_i` `[1, K, S, H]` and `kv_cache_v_i` `[1, K, H, S]`. It
returns `kv_slice_k_i` `[1, K, T, H]` and `kv_slice_v_i` `[1, K, H, T]` of the new tokens, and in decoding
the `logits`. The other steps make these. All accept (weights, inputs by name), and return results by name.
"""

import contextlib
import dataclasses
import datetime
import functools
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError, TemplateError, one_line
from jaxllm.export.contents import require_contents, require_family, require_format
from jaxllm.export.converter import Sharing, Traced, convert, traced, write_model
from jaxllm.export.folder import require_new
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.folder_format.signature import KEYS, LOGITS, VALUES
from jaxllm.export.placed import PlacedMatrices, described_weights
from jaxllm.export.quantized import Ranges, left_out
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.steps.exported import Arrays, with_adapters
from jaxllm.export.subject import Subject, only_level
from jaxllm.export.tflite import FILE, write_tflite
from jaxllm.files.atomic import atomic_file
from jaxllm.kv.cache import Past, TokenPositions, write_rows
from jaxllm.models.decoder import embed_tokens, forward_layer, logits
from jaxllm.models.features import require_feature
from jaxllm.models.layer import LayerParams, rotary_by_rope
from jaxllm.models.layer_stack import layer_of
from jaxllm.nn.layers import normalize
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

SUFFIX = ".litertlm"
EMBEDDER, AUX, PREFILL_DECODE = "EMBEDDER", "AUX", "PREFILL_DECODE"
SLICE_KEYS, SLICE_VALUES = "kv_slice_k_{}", "kv_slice_v_{}"
EMBEDDINGS = "embeddings"
MASKS = ("mask_global", "mask_local")
ANGLES = (("pos_emb_cos", "pos_emb_sin"), ("pos_emb_local_cos", "pos_emb_local_sin"))
Shapes = dict[str, jax.ShapeDtypeStruct]
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
    levels = [each for each in subject.levels if each != FULL_LEVEL]
    require_contents("litertlm", plan, levels=len(levels), adapters=subject.adapters is not None)
    require_family("litertlm", precision, subject.cfg, levels=bool(levels))
    plan = dataclasses.replace(plan, cache_tokens=())
    level = levels[0] if levels else FULL_LEVEL
    # Ranges are of the level's products.
    ranges = None if ranges is None else {FULL_LEVEL: ranges[level]}
    if level != FULL_LEVEL and precision == "w8a8" and subject.calibration and not plan.without_shadow:
        raise ConfigError(
            f"a {SUFFIX} file of level {level} has no shadow; export it with --precision int8, or say "
            "--without-shadow and measure what it loses"
        )
    without = left_out(subject, precision, without_shadow=plan.without_shadow)
    subject = dataclasses.replace(only_level(subject, level), tiny_lm=None)
    require_new(out)
    plan = plan.resolved(subject.cfg)
    if plan.npu and (precision != "f32" or plan.masked):
        raise ConfigError(
            "the models of an NPU are floats, which their compiler quantizes, and have masks of their own; "
            "leave --precision and --attention-mask out"
        )
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as folder, atomic_file(out) as file:
        if plan.npu:
            sharing = write_npu_models(Path(folder), subject, plan, progress)
        else:
            signatures = plan.signatures(FULL_LEVEL, lambda _: FILE)
            sharing = write_tflite(
                Path(folder), subject, plan, signatures, precision=precision, ranges=ranges, progress=progress
            )
            (Path(folder) / FILE).rename(Path(folder) / PREFILL_DECODE)
        models = sorted(Path(folder).iterdir())
        tokenizer_path, facts_path = (Path(folder) / name for name in ("t.json", "facts.pb"))
        tokenizer_path.write_text(subject.tokenizer.tokenizer_json, encoding="utf-8")
        facts_path.write_bytes(metadata(subject, plan).SerializeToString())
        _build(file, models, tokenizer_path, facts_path, without)
        if not plan.npu:
            # The runtime only opens names with this suffix, and an NPU's models only on an NPU.
            file.flush()
            tried = Path(folder) / f"tried{SUFFIX}"
            tried.symlink_to(Path(file.name).absolute())
            require_same_chats(tried, Tokenizer(subject.tokenizer), plan.context_tokens)
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
    if (sampling := subject.tokenizer.sampling) and sampling.get("temperature") == 0:
        message.sampler_params.type = message.sampler_params.GREEDY
    elif sampling:
        # What the model's authors recommend, as far as the runtime supports it: it has no min-p and no
        # penalties. Its top-p considers at most `k` tokens, hence `k` is all tokens without a top-k.
        message.sampler_params.type = message.sampler_params.TOP_P
        message.sampler_params.temperature = sampling.get("temperature", 1.0)
        message.sampler_params.k = int(sampling.get("top_k", 0)) or subject.cfg.vocab_size
        message.sampler_params.p = sampling.get("top_p", 1.0)
    message.llm_model_type.generic_model.SetInParent()
    message.jinja_prompt_template = runtime_template(tokenizer)
    message.supports_thinking = message.supports_function_calling = False
    return message


def _build(file: Any, models: Sequence[Path], tokenizer: Path, facts: Path, without: Sequence[str]) -> None:
    from litert_lm_builder import litertlm_builder as library

    builder = library.LitertLmFileBuilder()
    builder.add_system_metadata(library.Metadata(key="Authors", value="jaxllm", dtype=library.DType.STRING))
    for each in without:
        builder.add_system_metadata(library.Metadata(key="Without", value=each, dtype=library.DType.STRING))
    builder.add_llm_metadata(str(facts))
    # The runtime's own choice on a GPU is float16, in which models with large outliers overflow: SmolLM2 then
    # repeats one token. An NPU's three models are quantized by their compiler.
    numbers = "fp32" if len(models) == 1 else None
    for each in models:
        # The builder prints it.
        with contextlib.redirect_stdout(io.StringIO()):
            kind = library.TfLiteModelType[each.name]
            builder.add_tflite_model(str(each), kind, prefer_activation_type=numbers)
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


def require_same_chats(bundle: Path, tokenizer: Tokenizer, context_tokens: int) -> None:
    """Opens a file by the runtime, which answers a chat if that fits its context, and compares the rendered
    chats with the service's.

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
    texts = [_service_text(turns, tokenizer, now) for turns in chats]
    fits = len(tokenizer.encode(texts[0])) + 8 < context_tokens
    for wanted, found in zip(texts, _runtime_texts(bundle, chats, answers=fits), strict=True):
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


def _runtime_texts(bundle: Path, chats: Sequence[_Turns], *, answers: bool) -> list[str]:
    """Returns the texts that the runtime renders, empty if it fails, with the reason in its log; and lets it
    answer the first chat if `answers`."""
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine = litert_lm.Engine(str(bundle), backend=litert_lm.Backend.CPU(), cache_dir=folder)
            texts = [
                engine.create_conversation(messages=earlier).render_message_to_string(last)
                for *earlier, last in chats
            ]
            if answers and texts[0]:
                engine.create_conversation().send_message(chats[0][-1]["content"], max_output_tokens=2)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"LiteRT-LM does not open the model: {one_line(error)}") from error
    return texts


def write_npu_models(
    folder: Path, subject: Subject, plan: ExportPlan, progress: Progress | None = None
) -> Sharing:
    """Writes the models of the whole model of a subject into a folder, by type, and returns the bytes of the
    NPU's weights; `plan` is resolved.

    Raises:
      ConfigError: the model cannot be divided so, or the plan has several lengths of chunks.
    """
    require_divisible(subject.cfg)
    if len(plan.chunk_tokens) != 1:
        raise ConfigError(
            f"the models of an NPU have one length of chunks, not {plan.chunk_tokens}; give one "
            "--chunk-tokens, as 128"
        )
    parts = list(_parts(subject.cfg, plan))
    weights = described_weights(subject, FULL_LEVEL)
    embedding = {name: each for name, each in weights.items() if name.startswith("embed.")}
    given = {EMBEDDER: embedding, AUX: {}, PREFILL_DECODE: weights}
    made: dict[str, list[Traced]] = {model: [] for model in given}
    for done, (model, name, step, shapes) in enumerate(parts):
        made[model].append(traced(name, step, given[model], shapes))
        if progress is not None:
            progress("export", done + 1, len(parts))
    shared = {
        model: write_model(folder / model, convert(each), PlacedMatrices(subject, "f32"))
        for model, each in made.items()
    }
    return shared[PREFILL_DECODE]


def _parts(cfg: ModelConfig, plan: ExportPlan) -> Iterator[tuple[str, str, Any, Shapes]]:
    """Each signature: its model and name, its step, and the shapes of its inputs."""
    room = plan.context_tokens
    for suffix, tokens in ((f"_{plan.chunk_tokens[0]}", plan.chunk_tokens[0]), ("", 1)):
        kind = "prefill" if suffix else "decode"
        row = jax.ShapeDtypeStruct((1, tokens), np.int32)
        position = {"input_pos": jax.ShapeDtypeStruct((tokens,), np.int32)}
        asked = {"time_step": jax.ShapeDtypeStruct((1,), np.int32), "input_tokens": row}
        caches = _cache_shapes(cfg, room, KEYS, VALUES)
        kept = {**caches, **_cache_shapes(cfg, tokens, SLICE_KEYS, SLICE_VALUES), **position}
        run = functools.partial(run_layers, cfg=cfg, with_logits=not suffix)
        masks = functools.partial(run_masks, cfg=cfg, cache_tokens=room)
        angles, update, embed = (
            functools.partial(each, cfg=cfg) for each in (run_angles, run_cache_update, run_embedder)
        )
        yield EMBEDDER, f"{kind}_embedder{suffix}", embed, {"token_ids": row}
        yield AUX, f"{kind}_mask{suffix}", masks, asked
        yield AUX, f"{kind}_rope{suffix}", angles, position
        yield AUX, f"{kind}_cache_update{suffix}", update, kept
        embedded = jax.ShapeDtypeStruct((1, tokens, cfg.hidden_size), np.float32)
        aux = {**jax.eval_shape(angles, {}, position), **jax.eval_shape(masks, {}, asked)}
        yield PREFILL_DECODE, f"{kind}{suffix}", run, {EMBEDDINGS: embedded, **aux, **caches}


def require_divisible(cfg: ModelConfig) -> None:
    """Checks that a model can be divided so.

    Raises:
      ConfigError: its positions are not only angles, or its layers have windows of several lengths.
    """
    require_feature(cfg, "tflite")
    ropes = [each for each in (cfg.rope, cfg.local_rope) if each is not None]
    windows = {each for each in cfg.attention_windows if each}
    for lacking, feature in (
        (cfg.encoder is not None, "an encoder"),
        (not ropes or cfg.learned_positions, "positions that are no rotation"),
        (any(each.query_growth for each in ropes), "queries that grow with their position"),
        (len(windows) > 1, "windows of several lengths"),
    ):
        if lacking:
            raise ConfigError(
                f"the models of an NPU take no {feature}, as {cfg.model_type} has; export without --npu"
            )


def run_embedder(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`token_ids` `[1, T]` int32 -> `embeddings`."""
    tokens = inputs["token_ids"]
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return {EMBEDDINGS: embed_tokens(dict(weights), tokens, at, cfg=cfg)}


def run_angles(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`input_pos` `[T]` int32 -> the angles."""
    del weights
    found, known = {}, rotary_by_rope(inputs["input_pos"], cfg)
    for rope, names in zip((cfg.rope, cfg.local_rope), ANGLES, strict=True):
        if rope is not None:
            found |= {name: each[None, None] for name, each in zip(names, known[rope], strict=True)}
    return found


def run_masks(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig, cache_tokens: int) -> Arrays:
    """`time_step` `[1]` int32, the position of the first new token, and `input_tokens` `[1, T]` int32,
    negative for tokens that none attends to -> the masks."""
    del weights
    first, tokens = inputs["time_step"][0], inputs["input_tokens"][0]
    count = tokens.shape[0]
    new = jnp.arange(count, dtype=jnp.int32)
    key = jnp.arange(cache_tokens, dtype=jnp.int32)
    cached = jnp.broadcast_to(key < first, (count, cache_tokens))
    inside = (new[None] <= new[:, None]) & ((tokens >= 0)[None] | (new[None] == new[:, None]))
    whole = jnp.concatenate([cached, inside], axis=1)
    found = {MASKS[0]: whole[None, None]}
    window = max(cfg.attention_windows)
    if window:
        stands = jnp.concatenate([key, first + new])
        near = stands[None] > (first + new)[:, None] - np.int32(window)
        found[MASKS[1]] = (whole & near)[None, None]
    return found


def run_cache_update(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig) -> Arrays:
    """`input_pos` `[T]` int32, the caches and the slices -> the caches with the slices of valid tokens,
    whose position is that of the first one plus their index."""
    del weights
    position, found = inputs["input_pos"], {}
    real = position == position[0] + jnp.arange(position.shape[0], dtype=jnp.int32)
    valid = jnp.sum(real, dtype=jnp.int32)
    for layer in range(cfg.layers):
        keys, values = KEYS.format(layer), VALUES.format(layer)
        found[keys] = write_rows(inputs[keys], inputs[SLICE_KEYS.format(layer)], position[0], valid)
        rows, new = _turned(inputs[values]), _turned(inputs[SLICE_VALUES.format(layer)])
        found[values] = _turned(write_rows(rows, new, position[0], valid))
    return found


def run_layers(weights: Arrays, inputs: Arrays, *, cfg: ModelConfig, with_logits: bool) -> Arrays:
    """The NPU's part (see the module)."""
    params, x = with_adapters(weights, cfg), inputs[EMBEDDINGS]
    count, found = x.shape[1], {}
    # Masks have the windows, and angles are known.
    plain = dataclasses.replace(cfg, attention_windows=(), local_rope=None)
    for layer in range(cfg.layers):
        rope, mask = cfg.layer_rope(layer), inputs[MASKS[bool(cfg.attention_windows[layer])]][0, 0]
        rotary = None
        if rope is not None:
            cos, sin = ANGLES[rope is not cfg.rope]
            rotary = inputs[cos][0, 0], inputs[sin][0, 0]
        keys, values = inputs[KEYS.format(layer)], _turned(inputs[VALUES.format(layer)])
        at = TokenPositions(
            jnp.arange(count, dtype=jnp.int32), jnp.int32(count), consecutive=True, mask=mask, apart=True
        )
        own = layer_of(params, layer)
        x, past, _ = forward_layer(own, x, at, Past(keys, values), cfg=plain, layer=layer, order=rotary)
        found[SLICE_KEYS.format(layer)], found[SLICE_VALUES.format(layer)] = past.keys, _turned(past.values)
    if with_logits:
        hidden = normalize(x, LayerParams(params, "").norm("final_norm", cfg))
        found[LOGITS] = logits(params, hidden, cfg=cfg)
    return found


def _cache_shapes(cfg: ModelConfig, tokens: int, keys: str, values: str) -> Shapes:
    found = {}
    for layer in range(cfg.layers):
        heads, width = cfg.units(layer).kv_heads, cfg.head_dim
        found[keys.format(layer)] = jax.ShapeDtypeStruct((1, heads, tokens, width), np.float32)
        found[values.format(layer)] = jax.ShapeDtypeStruct((1, heads, width, tokens), np.float32)
    return found


def _turned(values: jax.Array) -> jax.Array:
    return jnp.swapaxes(values, 2, 3)
