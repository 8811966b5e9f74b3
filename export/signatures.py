"""Plans the programs of an export as named signatures, and computes the shapes of their arguments.

There is one signature per level, number of new tokens and cache length (see `jaxllm.export.steps.exported`
for names and shapes). All lengths are the engine's, so that a loop over programs divides prompts and grows
caches as the engine does.

Of a tiny LM, large matrices are at 8 bits if native kernels serve them; programs get the same levels and
scales, as `{name}.levels` `[U, D]` int8 and `{name}.scale` `[U, 1]` float32, and round activations as those
kernels do.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.contexts.codecs import find_codec
from jaxllm.elastic.compression import row_lengths
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.manifest import CacheDtype
from jaxllm.export.folder_format.parts import KEEP, MODEL, PROMPT, TinyLmFacts
from jaxllm.export.folder_format.signature import (
    CODED_KINDS,
    MASK,
    TOKENS,
    Interface,
    Kind,
    Signature,
    interface_of,
    level_signatures,
)
from jaxllm.export.programs.jax_programs import jax_shapes
from jaxllm.export.quantized import plain_product
from jaxllm.export.steps.exported import (
    Arrays,
    ParamsOf,
    Step,
    StepOptions,
    run_chunks,
    step_of,
    with_adapters,
)
from jaxllm.export.subject import Subject, shapes_of
from jaxllm.models.features import require_decoder_alone
from jaxllm.models.tiny_lm import TlmConfig, forward_both
from jaxllm.options import check_options, option
from jaxllm.quant import OwnProduct, QArray, Weight
from jaxllm.serving.elastic.tiny_lm import served_arrays
from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS, DEFAULT_CONTEXT_TOKENS, cache_lengths

# Number of inputs that share a scale of activations in native kernels, and number of its steps.
_SPAN, _TOP = 256, 127
# Number of tokens of the chunks that a program encodes or loads at once.
_CODED_TOKENS = 128
# Suffixes of the names of int8 levels of a tiny LM and of their scales.
LEVELS, SCALE = ".levels", ".scale"
# Programs with a mask as input if a plan says so.
MASKED_KINDS: tuple[Kind, ...] = ("prefill", "decode")
CacheWidth = Literal["f32", "f16", "int8"]
_CACHES: Mapping[CacheWidth, CacheDtype] = {"f32": "float32", "f16": "float16", "int8": "int8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """The programs to export.

    Attributes:
      context_tokens: length of the longest caches; 0 chooses the model's window, up to 2048.
      chunk_tokens: prefill chunk lengths, ascending.
      verify_tokens: sizes of token trees to verify; these programs also score text in few dispatches.
      block_tokens: maximum number of tokens of a program that decodes several; 0 for none.
      cache_tokens: cache lengths besides the whole context, for shorter sequences; None chooses the engine's.
      encode_tokens: lengths of sources, ascending; in a resolved plan those of chunks, and the longest
        source of an encoder-decoder. Its decoder begins with few tokens, so that the shortest chunk is
        enough there.
      levels: levels of an elastic bundle, in percent, besides the whole model.
      without_shadow: whether a calibrated bundle becomes w8a8 without its calibration.
      masked: whether prefill and decode accept an attention mask, for runtimes that make it themselves.
      npu: whether the model is divided between an NPU and its CPU (see `litertlm.py`).
      stages: whether the stages of prefill are programs of their own, too, for two processors (see
        `jaxllm.export.stages`).
      codec: name of the codec whose programs encode and load chunks of contexts; empty for none.
      cache: width of keys and values in caches.
      static_verify: whether verify programs of w8a8 multiply as prefill programs do, to score a text by them.
      release: see `jaxllm.export.folder_format.manifest.Manifest`.
    """

    context_tokens: int = option(0, low=0)
    chunk_tokens: tuple[int, ...] = option(CPU_CHUNK_TOKENS, low=2, entries=1, ascending=True)
    verify_tokens: tuple[int, ...] = option((), low=2, high=256, ascending=True)
    block_tokens: int = option(0, low=0, high=64)
    cache_tokens: tuple[int, ...] | None = option(None, low=2, ascending=True)
    encode_tokens: tuple[int, ...] = ()
    levels: tuple[int, ...] = option((), low=1, high=FULL_LEVEL, ascending=True)
    without_shadow: bool = False
    static_verify: bool = False
    masked: bool = False
    npu: bool = False
    stages: bool = False
    codec: str = ""
    cache: CacheWidth = "f32"
    release: int = option(0, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        if self.block_tokens == 1:
            raise ConfigError("block_tokens must be at least 2, or 0 for no blocks, got 1")
        if self.codec:
            find_codec(self.codec)

    def resolved(self, cfg: ModelConfig) -> "ExportPlan":
        """Returns the plan with a context that fits the model, caches no longer than it, and chunks and
        blocks no longer than both.

        Raises:
          ConfigError: the context is longer than the model's window, or something does not fit it.
        """
        context = self.context_tokens or min(cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
        if not 1 <= context <= cfg.window_tokens:
            raise ConfigError(
                f"a context of {context} tokens does not fit the model's window of {cfg.window_tokens}"
            )
        chunks = tuple(each for each in self.chunk_tokens if each <= context)
        if not chunks:
            raise ConfigError(f"no chunk of {self.chunk_tokens} tokens fits the context of {context}")
        if max(self.verify_tokens, default=0) > context:
            raise ConfigError(f"trees of {self.verify_tokens[-1]} nodes do not fit the context of {context}")
        caches = self.cache_tokens
        if caches is None:
            caches = tuple(each for each in cache_lengths(context)[:-1] if each >= chunks[0])
        elif caches and not chunks[0] <= caches[0] <= caches[-1] < context:
            raise ConfigError(
                f"caches of {caches} tokens must be shorter than the context of {context}, and hold the "
                f"shortest chunk of {chunks[0]}"
            )
        sources: tuple[int, ...] = ()
        if self.codec:
            require_decoder_alone(cfg, "contexts of programs", "leave --codec out")
        if self.cache != "f32":
            require_decoder_alone(cfg, "narrow caches", "leave --cache out")
        if self.cache != "f32" and (self.stages or self.npu or (self.codec and self.cache == "int8")):
            raise ConfigError(
                f"stages, models of an NPU and, at int8, codecs read caches of f32, not {self.cache}; leave "
                "--cache out"
            )
        if cfg.encoder is not None:
            longest = min(cfg.encoder.window_tokens, context)
            sources = (*(each for each in chunks if each < longest), longest)
            chunks = chunks[:1]
        return dataclasses.replace(
            self,
            context_tokens=context,
            chunk_tokens=chunks,
            encode_tokens=sources,
            block_tokens=min(self.block_tokens, context),
            cache_tokens=caches,
        )

    @property
    def static_kinds(self) -> tuple[Kind, ...]:
        """Kinds of programs that have static steps at w8a8."""
        return ("prefill", "verify") if self.static_verify else ("prefill",)

    def signatures(self, level: int, file: Callable[[str], str]) -> list[Signature]:
        """The signatures of a level of a resolved plan; `file`: name of a signature -> its file."""
        return level_signatures(
            level,
            encode_tokens=self.encode_tokens,
            chunk_tokens=self.chunk_tokens,
            verify_tokens=self.verify_tokens,
            block_tokens=self.block_tokens,
            cache_tokens=self.cache_tokens or (),
            codec=(self.codec, min(_CODED_TOKENS, self.context_tokens) if self.codec else 0),
            file=file,
        )

    def room(self, signature: Signature) -> int:
        """Positions of a signature's caches (S). With masks the longest chunk fits after any token of the
        context, padding included, so that programs write it as it is."""
        more = self.chunk_tokens[-1] if self.masked else 0
        return (signature.cache_tokens or self.context_tokens) + more

    @property
    def cache_name(self) -> CacheDtype:
        """The dtype of caches, for activations in float32."""
        return _CACHES[self.cache]

    def interface(self, signature: Signature, subject: Subject, dtype: np.dtype) -> Interface:
        """The arrays of a signature's program besides its weights, for activations of a dtype; `self` is
        resolved."""
        return interface_of(
            signature,
            subject.levels[signature.level].cfg,
            self.room(signature),
            dtype if self.cache == "f32" else np.dtype(self.cache_name),
            source_tokens=max(self.encode_tokens, default=0),
            adapter_size=0 if subject.adapters is None else subject.adapters.inputs.size(signature.level),
            tiny_lm=None if subject.tiny_lm is None else tiny_facts(subject.tiny_lm),
        )


def step_shapes(
    signature: Signature, subject: Subject, plan: ExportPlan, dtype: np.dtype
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The shapes of a step's weights, caches and inputs, by name."""
    arrays, interface = step_weights(signature, subject), plan.interface(signature, subject, dtype)
    inputs = interface.inputs
    if plan.masked and signature.kind in MASKED_KINDS:
        inputs = {**inputs, MASK: ((1, 1, signature.tokens, plan.room(signature)), np.dtype(np.bool_))}
    return shapes_of(arrays), jax_shapes(interface.caches), jax_shapes(inputs)


def step_weights(signature: Signature, subject: Subject) -> Mapping[str, np.ndarray]:
    """The weights of a signature's step by name."""
    if signature.kind in CODED_KINDS:
        return {}
    if signature.kind == "tiny_lm":
        assert subject.tiny_lm is not None
        return tiny_weights(subject.tiny_lm)
    return subject.weights(signature.level)


def subject_step(
    signature: Signature,
    subject: Subject,
    dtype: np.dtype,
    *,
    loops: bool = True,
    params_of: ParamsOf = with_adapters,
) -> Step:
    """The step of a signature (see `step_of`), of the subject's model or of its tiny LM."""
    if signature.kind == "tiny_lm":
        assert subject.tiny_lm is not None
        return functools.partial(run_tiny_lm, cfg=subject.tiny_lm.cfg)
    cfg = subject.levels[signature.level].cfg
    if signature.kind in CODED_KINDS:
        return functools.partial(run_chunks, cfg=cfg, signature=signature)
    inputs = None if subject.adapters is None else subject.adapters.inputs
    return step_of(signature, StepOptions(cfg, dtype, params_of), loops=loops, adapters=inputs)


def tiny_facts(tiny: TinyLm) -> TinyLmFacts:
    """Returns the manifest's facts about a tiny LM."""
    return TinyLmFacts(
        levels=tiny.levels,
        prompt_ratios=tiny.prompt_ratios,
        mark_ids=tiny.mark_ids,
        row_tokens=tiny.row_tokens,
        own_tokenizer=tiny.tokenizer is not None,
    )


def tiny_signatures(tiny: TinyLm | None, file: Callable[[str], str]) -> list[Signature]:
    """The signatures of a tiny LM, none of None; `file`: name of a signature -> its file."""
    if tiny is None:
        return []
    return [
        Signature(kind="tiny_lm", tokens=each, level=FULL_LEVEL, file=file(f"tiny_lm_{each}"))
        for each in row_lengths(tiny.row_tokens)
    ]


def tiny_weights(tiny: TinyLm) -> dict[str, np.ndarray]:
    """The weight arguments of a tiny LM's programs: float32, and large matrices at 8 bits as native kernels
    serve them."""
    weights = {}
    for name, each in served_arrays(tiny.params, native_here=True).items():
        if isinstance(each, QArray):
            weights[f"{name}{LEVELS}"] = np.asarray(each.data, np.int8)
            weights[f"{name}{SCALE}"] = np.asarray(each.scale, np.float32)
        else:
            weights[name] = np.asarray(each, np.float32)
    return weights


def run_tiny_lm(weights: Arrays, caches: Arrays, inputs: Arrays, *, cfg: TlmConfig) -> dict[str, jax.Array]:
    """Scores the tokens of a row, and classifies it (see `jaxllm.export.folder_format.parts`); `caches` is
    empty."""
    del caches
    params: dict[str, Weight] = {}
    for name, each in weights.items():
        if name.endswith(LEVELS):
            bare = name.removesuffix(LEVELS)
            wide = each.astype(jnp.float32) * weights[f"{bare}{SCALE}"]
            params[bare] = OwnProduct(wide, rounded_product)
        elif f"{name.removesuffix(SCALE)}{LEVELS}" not in weights:
            params[name] = each
    keep, (model, prompt) = forward_both(params, inputs[TOKENS], inputs[MASK], cfg=cfg)
    return {KEEP: keep, MODEL: model, PROMPT: prompt}


def rounded_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiplies activations `[M, N]`, rounded to 8 bits span by span, by a matrix whose `axis` is
    contracted."""
    parts = []
    for at in range(0, rows.shape[1], _SPAN):
        part = rows[:, at : at + _SPAN]
        scale = jnp.max(jnp.abs(part), axis=1, keepdims=True) / np.float32(_TOP)
        scale = jnp.where(scale > 0, scale, np.float32(1))
        parts.append(jnp.round(part / scale) * scale)
    return plain_product(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1), matrix, axis)
