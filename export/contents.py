"""Lists the contents of each format's programs, and the packages that it needs: the only place that names
what a format lacks.

Exporters call `require_contents`; the guide of exports lists `CONTENTS`.
"""

import dataclasses
import importlib.util
from typing import Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a format besides prefill chunks and decode of one token.

    Attributes:
      blocks: whether it has programs that decode several tokens.
      block_tokens: tokens of such a program by default; 0 for none.
      verified: drafts that its `verify` programs accept in our loop, "lines" or "trees"; empty for none.
      levels: its sub-models: "yes" for any, "one" for one in place of the whole model.
      short_caches: whether it has programs over caches shorter than the context.
      encoders: whether it has the programs of an encoder-decoder: those that encode besides.
      tiny_lm: whether it has the programs of the tiny LM.
      adapters: whether its programs accept adapters as an input.
      masks: whether its programs may accept an attention mask.
      npu: whether it may have the three models of an NPU, in floats.
      codecs: whether it has programs of the codecs of contexts.
      caches: widths of keys and values that its programs may have besides that of activations.
      stages: whether it may have the stages of w8a8 prefill, for two processors.
      extra, modules: the extra that it needs, and the modules of that extra.
    """

    blocks: bool = False
    block_tokens: int = 0
    verified: str = ""
    levels: str = "yes"
    short_caches: bool = True
    encoders: bool = True
    tiny_lm: bool = True
    adapters: bool = True
    masks: bool = False
    npu: bool = False
    stages: bool = False
    codecs: bool = True
    caches: tuple[str, ...] = ()
    precisions: tuple[str, ...]
    extra: str = "export"
    modules: tuple[str, ...] = ("flatbuffers", "litert_converter", "ai_edge_litert")


_TFLITE = Contents(
    blocks=True,
    verified="lines",
    stages=True,
    caches=("f16", "int8"),
    precisions=("f32", "int8", "int4", "w8a8"),
)
CONTENTS = {
    "stablehlo": Contents(
        blocks=True,
        block_tokens=16,
        verified="trees",
        precisions=("f32", "bf16"),
        extra="stablehlo",
        modules=("flatbuffers",),
    ),
    "tflite": _TFLITE,
    "device": _TFLITE,
    "litertlm": Contents(
        masks=True,
        npu=True,
        levels="one",
        short_caches=False,
        encoders=False,
        tiny_lm=False,
        adapters=False,
        codecs=False,
        caches=("f16", "int8"),
        precisions=_TFLITE.precisions,
        modules=(*_TFLITE.modules, "litert_lm_builder", "litert_lm"),
    ),
}
# Formats of plain models, and their precisions.
PLAIN = {"hf": ("f32", "bf16", "f16"), "gguf": ("f32", "bf16", "f16", "int8")}


def require_contents(kind: str, plan: Any, *, levels: int, adapters: bool = False) -> None:
    """Checks that a format supports a plan.

    Args:
      plan: the requested `jaxllm.export.signatures.ExportPlan`.
      levels: number of levels besides the whole model.
      adapters: whether programs are to accept adapters.

    Raises:
      ConfigError: it does not; the message names the options to leave out.
    """

    def lacking(holds: Contents) -> list[str]:
        asked = {
            "--level": levels > 1 and holds.levels == "one",
            "--attention-mask": plan.masked and not holds.masks,
            "--npu": plan.npu and not holds.npu,
            "--codec": plan.codec and not holds.codecs,
            "--stages": plan.stages and not holds.stages,
            "--verify-tokens": plan.verify_tokens and not holds.verified,
            "--block-tokens": plan.block_tokens and not holds.blocks,
            "--adapter-input": adapters and not holds.adapters,
            "--cache": plan.cache != "f32" and plan.cache not in holds.caches,
            "--cache-tokens": plan.cache_tokens and not holds.short_caches,
        }
        return [name for name, wrong in asked.items() if wrong]

    if options := lacking(CONTENTS[kind]):
        others = [name for name, each in CONTENTS.items() if not lacking(each)]
        instead = f", or export as {' or '.join(others)}" if others else ""
        them = "it" if len(options) == 1 else "them"
        raise ConfigError(
            f"the {kind} format holds no programs of {', '.join(options)}; leave {them} out{instead}"
        )


def require_family(kind: str, precision: str, cfg: ModelConfig, *, levels: bool = False) -> None:
    """Checks that a format supports a model of a family, at a precision, with or without levels.

    Raises:
      ConfigError: it does not support encoder-decoders, or their levels, and the model is one.
    """
    if cfg.encoder is None:
        return
    if levels:
        raise ConfigError(
            f"no format holds levels of encoder-decoders, and {cfg.model_type} is one; leave --level out"
        )
    if not CONTENTS[kind].encoders:
        there = " or ".join(name for name, each in CONTENTS.items() if each.encoders)
        raise ConfigError(
            f"the {kind} format holds no programs of encoder-decoders, and {cfg.model_type} is one; export "
            f"as {there}"
        )
    if precision == "w8a8":
        raise ConfigError(
            f"{precision} programs are not made of encoder-decoders, and {cfg.model_type} is one: their "
            "scales are found on a text, by a decoder alone; take --precision int8 or f32"
        )


def require_format(kind: str) -> None:
    """Checks that the packages of a format are installed.

    Raises:
      ConfigError: one is not; the message has the command that installs it.
    """
    if kind in CONTENTS:
        require_extra(CONTENTS[kind].extra, *CONTENTS[kind].modules)
    elif kind == "gguf":
        require_extra(kind, kind)


def require_extra(extra: str, *modules: str) -> None:
    """Checks that the packages of an extra are installed.

    Raises:
      ConfigError: one is not; the message has the command that installs it.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run "
            f"`pip install 'jaxllm[{extra}]'`, in a virtual environment of its own, for packages of other "
            "extras may exclude it"
        )
