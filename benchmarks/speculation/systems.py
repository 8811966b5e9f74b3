"""Opens the systems that run a model larger than memory: ours, LLMCad as published, both without each
technique, and LLMCad's baselines.

All have the same buckets, reader and memory for weights: a draft leaves less room for layers. What a system
may be tuned by is tried on prompts that are not counted (see `answers.tuned`).

The glossary describes the baselines: STI (arXiv 2207.05022) and BLD (arXiv 2302.07863), whose answers differ,
SP (arXiv 2211.17192), Std and StdPL.

STI keeps a model as shards whose bitwidths are chosen one by one: all get the widest that fits, and what is
left goes to the shards that matter most to accuracy. Here a shard is a layer's attention or its feed-forward
block, the smallest that the kernels of all systems compute at a bitwidth of its own; embedding and head stay
as the target has them. A shard's importance is how far the model's predictions on given texts move from the
target's when the shard alone has as few bits as all get at first.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.report import OURS
from benchmarks.models import float_params, made_once
from benchmarks.speculation import PRESETS
from jaxllm.bundle import Bundle, rewrite_bundle, write_bundle
from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import BudgetExceeded
from jaxllm.kv.cache import KVCache
from jaxllm.models.decoder import forward, logits
from jaxllm.models.parameters import param_specs
from jaxllm.quant import BITS, BlockedArray, dequantize, quantize, to_blocks
from jaxllm.quant.formats import Bits
from jaxllm.sampling import SamplerState
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import SpeculationOptions, TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.loading import LoadedModel
from jaxllm.serving.runners.runner import Verdict
from jaxllm.serving.speculation.costs import DraftTimes
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.serving.speculation.drafters import make_drafter
from jaxllm.serving.speculation.speculation import Speculation
from jaxllm.serving.weights.memory_plan import drafter_bytes, fixed_bytes, whole_budget
from jaxllm.serving.weights.prefetch import Meanwhile
from jaxllm.speculation.growth import LEAST
from jaxllm.speculation.token_tree import Growing
from jaxllm.speculation.tree import TokenTree

PUBLISHED = "LLMCad"
STDPL, STI, SP, BLD = "StdPL", "STI", "SP", "BLD"
# Mean bits that are tried for STI; a run without tuning takes the middle.
NARROW_BITS = (3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The same models, memory and storage for all systems.

    Attributes:
      model: the target, a bundle.
      draft: a small model of its tokenizer; None for the target's own high planes.
      narrow: the target's bundles for STI, by their mean bits; empty where STI is not opened.
      weights_bytes: memory for weights, the draft's included; caches and activations come on top.
    """

    model: Path
    draft: Path | None
    narrow: Mapping[float, Path]
    weights_bytes: int
    context_tokens: int
    storage: Storage

    @property
    def drafter(self) -> dict[str, Any]:
        """Options of speculation that name the drafter."""
        return {"drafter": "nested"} if self.draft is None else {"model": self.draft}


Opener = Callable[[Setting], Engine]


def plain(setting: Setting, *, read_ahead: bool = True, narrow_bits: float = 0.0) -> Engine:
    """An engine without a draft; of the target, or of one of its bundles for STI."""
    model = setting.narrow[narrow_bits] if narrow_bits else setting.model
    return Engine.open(model, options=_options(setting, model, read_ahead=read_ahead))


def ours(setting: Setting) -> Engine:
    """Our engine; where memory has no room for the target's high planes, it drafts by lookup."""
    try:
        return drafted(setting)
    except BudgetExceeded:
        if setting.draft is not None:
            raise
        return looked_up(setting)


def looked_up(setting: Setting) -> Engine:
    """Our engine with drafts of what the text has said before."""
    return drafted(setting, drafter="ngram", model=None)


def drafted(setting: Setting, *, published: bool = False, **speculation: Any) -> Engine:
    """An engine with a draft: ours, or as LLMCad has published it; with other options of speculation."""
    make = SpeculationOptions.published if published else SpeculationOptions
    options = make(**{**setting.drafter, **speculation})
    return Engine.open(setting.model, options=_options(setting, setting.model, options), speculation=options)


# Without our techniques.
_PLAIN: dict[str, Any] = {"pipelined": False, "pausing": False, "lookup": False}


def fixed_lines(setting: Setting, length: int) -> Engine:
    """SP with drafts of `length` tokens."""
    trees = TreeShape(nodes=(length + 1,), room=length + 1, tips=1, branches=1)
    return drafted(setting, trees=trees, alpha=LEAST, fallback="fixed", **_PLAIN)


def big_little(setting: Setting, fallback: float, rollback: float) -> Engine:
    """BLD: the small model goes on alone while a token has at least the probability `fallback`; the large one
    accepts a token of at most `rollback` nats."""
    # At most ten tokens of the small model in a line.
    trees = TreeShape(nodes=(11,), room=12, tips=1, branches=1)
    options = SpeculationOptions(**setting.drafter, trees=trees, fallback="fixed", **_PLAIN)
    engine_options = dataclasses.replace(_options(setting, setting.model, options), trees=options.trees)
    bundle = open_model(setting.model)
    reserved = drafter_bytes(options, setting.context_tokens, bundle.cfg)
    model = LoadedModel(bundle, engine_options, reserved_bytes=reserved)
    drafter = _UntilUnsure(make_drafter(model, options), fallback)
    # Greedy alone.
    target: Any = _Lenient(model.runner(FULL_LEVEL), rollback)
    speculation = Speculation(target, drafter, options)
    engine = Engine(model, FULL_LEVEL, speculation)
    engine.warm_up()
    return engine


def systems(
    *,
    baselines: bool = True,
    drafters: bool = True,
    ablations: bool = True,
    presets: Sequence[str] = tuple(PRESETS),
    pipelined: bool = True,
) -> dict[str, Opener]:
    """What opens each system that is not tuned, by name, ours first.

    Args:
      baselines: whether those of LLMCad are among them.
      drafters: whether ours by lookup alone and StdPL are among them.
      ablations: whether there are systems without each technique in turn.
      presets: of `PRESETS`. Ours is always there.
      pipelined: whether the drafter drafts on while weights are read, which can be left out then.
    """
    found: dict[str, Opener] = {OURS: ours}
    if "published" in presets and (baselines or ablations):
        found[PUBLISHED] = lambda s: drafted(s, published=True)
    if baselines:
        found |= {"Std": lambda s: plain(s, read_ahead=False), STDPL: plain}
    if drafters:
        found |= {STDPL: plain, f"{OURS}-ngram": looked_up}
    if not ablations:
        return found
    tree, as_published = TreeShape(), TreeShape.published()
    if "ours" in presets:
        found |= {
            f"{OURS}-no-tree": lambda s: drafted(s, trees=_line(tree)),
            f"{OURS}-no-pipeline": lambda s: drafted(s, pipelined=False),
            f"{OURS}-no-pacer": lambda s: drafted(s, trees=dataclasses.replace(tree, pacer="order")),
            f"{OURS}-fair-pacer": lambda s: drafted(s, trees=dataclasses.replace(tree, pacer="fair")),
            f"{OURS}-learned-fallback": lambda s: drafted(s, fallback="learned"),
            f"{OURS}-fixed-threshold": lambda s: drafted(s, fallback="fixed"),
            f"{OURS}-no-calibration": lambda s: drafted(s, calibrated=False),
            f"{OURS}-no-lookup": lambda s: drafted(s, lookup=False),
            f"{OURS}-ngram": looked_up,
        }
    if "published" in presets:
        found |= {
            f"{PUBLISHED}-no-tree": lambda s: drafted(s, published=True, trees=_line(as_published)),
            f"{PUBLISHED}-no-pipeline": lambda s: drafted(s, published=True, pipelined=False),
        }
    return {name: each for name, each in found.items() if pipelined or not name.endswith("-no-pipeline")}


def tuned_systems(
    *,
    baselines: bool = True,
    drafters: bool = True,
    ablations: bool = True,
    presets: Sequence[str] = tuple(PRESETS),
    pipelined: bool = True,
) -> dict[str, dict[str, Opener]]:
    """What opens each system that is tuned, by name and by what is tried; arguments as of `systems`."""
    del drafters, pipelined
    found: dict[str, dict[str, Opener]] = {}
    if baselines:
        found[SP] = {f"lines of {each}": partial(fixed_lines, length=each) for each in (2, 4, 7)}
        # In and around the middle of what its paper tunes in.
        found[BLD] = {
            f"fallback below {fallback}, rollback above {rollback} nats": partial(
                big_little, fallback=fallback, rollback=rollback
            )
            for fallback, rollback in ((0.4, 1.5), (0.4, 5.0), (0.6, 3.0), (0.8, 1.5), (0.8, 5.0))
        }
        found[STI] = {f"{bits:g} bits on average": partial(plain, narrow_bits=bits) for bits in NARROW_BITS}
    names = {"ours": OURS, "published": PUBLISHED}
    for preset in presets if ablations else ():
        found[f"{names[preset]}-no-fallback"] = {
            f"{nodes} nodes": partial(_no_fallback, nodes=nodes, published=preset == "published")
            for nodes in (4, 8, 16)
        }
    return found


def _no_fallback(setting: Setting, nodes: int, *, published: bool) -> Engine:
    """An engine whose drafts end at a number of drafted nodes, however sure they are."""
    tree = TreeShape.published() if published else TreeShape()
    sizes = (*(each for each in tree.nodes if each <= nodes), nodes + 1)
    tree = dataclasses.replace(tree, nodes=sizes)
    return drafted(setting, published=published, trees=tree, fallback="fixed", alpha=LEAST)


def _line(tree: TreeShape) -> TreeShape:
    """Lines instead of trees; a line has one tip."""
    return dataclasses.replace(tree, tips=1, branches=1)


def _options(
    setting: Setting, model: Path, speculation: SpeculationOptions | None = None, *, read_ahead: bool = True
) -> EngineOptions:
    """An engine's options: memory for the setting's bytes of weights, and for caches and activations."""
    trees = None if speculation is None else speculation.trees
    asked = EngineOptions(context_tokens=setting.context_tokens, trees=trees)
    with open_model(model) as bundle:
        around = fixed_bytes(bundle.cfg, asked.resolve(bundle.cfg, quantized=True))
        if speculation is not None:
            around += drafter_bytes(speculation, setting.context_tokens, bundle.cfg)
    if speculation is not None and speculation.model is not None:
        # The draft's weights are among those of the setting.
        with open_model(speculation.model) as bundle:
            around -= bundle.weight_bytes
    return dataclasses.replace(
        asked,
        memory_bytes=whole_budget(setting.weights_bytes + around),
        storage=setting.storage,
        read_ahead=read_ahead,
    )


class _UntilUnsure:
    """A drafter that ends its line before the first token that it is unsure of (see `Drafter`)."""

    most_bytes = size_bytes = 0

    def __init__(self, drafter: Drafter, fallback: float) -> None:
        self._drafter, self._fallback = drafter, fallback
        self.times = DraftTimes()
        self.warm_up, self.step, self.follow = drafter.warm_up, drafter.step, drafter.follow
        self.read, self.release = drafter.read, drafter.release

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; alpha, a bound for whole paths, is not used."""

        def longer(alpha: float, most: int) -> TokenTree:
            return self._drafter.grow(sequence, root, Growing(alpha, most), cache)[0]

        tree = longer(LEAST, 2)
        while (count := int(tree.count)) <= growing.most:
            whole = float(tree.confidences[count - 2]) if count > 1 else 1.0
            if count < 2 or float(tree.confidences[count - 1]) < self._fallback * whole:
                break
            if count == growing.most:
                return tree, cache
            tree = longer(1e-30, count + 1)
            if int(tree.count) == count:
                return tree, cache
        return dataclasses.replace(tree, count=np.int32(max(1, int(tree.count) - 1))), cache  # pyright: ignore


class _Lenient:
    """A target that accepts all drafted tokens that it does not find too unlikely."""

    def __init__(self, target: Any, rollback: float) -> None:
        self._target, self._rollback = target, rollback

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def verify(
        self,
        tree: TokenTree,
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Meanwhile | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """See `LayerwiseRunner.verify`."""
        logits, cache = self._target.tree_logits(tree, cache, meanwhile)
        logits = logits - logits.max(axis=1, keepdims=True)
        likely = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tokens, count, said, path = np.asarray(tree.tokens), int(tree.count), [], [0]
        for node in range(1, count):
            if len(said) + 1 >= limit or -likely[node - 1, tokens[node]] > self._rollback:
                break
            said.append(int(tokens[node]))
            path.append(node)
        said.append(int(likely[path[-1]].argmax()))
        nodes = np.full(tree.room, path[-1], np.int32)
        nodes[: len(path)] = path
        cache = self._target.keep_path(cache, nodes, len(path))
        return Verdict.of(np.array(said, np.int32), len(said), path), cache, sampler


_VERSION = 2
# Texts are cut after so many tokens, so that one compiled step scores all of them.
_TEXT_TOKENS = 64


def shards_of(cfg: ModelConfig) -> dict[str, list[str]]:
    """The names of each shard's matrices, by shard."""
    found: dict[str, list[str]] = {}
    for name, spec in param_specs(cfg).items():
        if name.startswith("layers.") and spec.role != "vector":
            found.setdefault(".".join(name.split(".")[:3]), []).append(name)
    return found


def plan_widths(
    importance: Mapping[str, float], sizes: Mapping[str, int], mean_bits: float
) -> dict[str, Bits]:
    """Bitwidths of shards.

    Args:
      sizes: of each shard, in weights.
      mean_bits: most bits of a weight, on average; at least the fewest that there are.
    """
    first, widths = first_bits(mean_bits), dict[str, Bits]()
    widths.update((shard, first) for shard in sizes)
    room = (mean_bits - first) * sum(sizes.values())
    for shard in sorted(sizes, key=lambda each: -importance[each]):
        for bits in reversed(BITS):
            more = (bits - widths[shard]) * sizes[shard]
            if 0 < more <= room:
                widths[shard] = bits
                room -= more
    return widths


def first_bits(mean_bits: float) -> Bits:
    """The bits that all shards get at first: the most that `mean_bits` has room for."""
    return max(bits for bits in BITS if bits <= mean_bits)


def narrow_bundles(
    model: Path, mean_bits: Sequence[float], texts: Sequence[Sequence[int]], progress: Progress = silent
) -> dict[float, Path]:
    """Bundles of a model for STI, by their mean bits of a shard's weight, made unless they are there.

    Args:
      mean_bits: of each bundle; bits that all shards can have are the same for all.
      texts: token ids on which importance is measured, none of them counted otherwise.
    """
    with Bundle.open(_without_planes(model)) as bundle:
        digest = hashlib.sha256(repr([list(each) for each in texts]).encode()).hexdigest()[:8]
        shards, specs = shards_of(bundle.cfg), param_specs(bundle.cfg)

        def write(path: Path, bits: float) -> None:
            floats = float_params(bundle)
            sizes = {shard: sum(floats[name].size for name in names) for shard, names in shards.items()}
            importance = dict.fromkeys(shards, 0.0)
            if bits not in BITS:
                importance = shard_importance(bundle.cfg, floats, texts, first_bits(bits), progress)
            widths = plan_widths(importance, sizes, bits)
            narrowed = {
                name: _narrowed(floats[name], widths[shard], contracted_axis(specs[name]))
                for shard, names in shards.items()
                for name in names
                # What has so many bits already stays.
                if bundle.layout.tensors[name].bits != widths[shard]
            }
            without = dict.fromkeys(bundle.layout.parts)
            name = f"{bundle.layout.name}, {bits:g} bits"
            rewrite_bundle(path, bundle, without, name=name, instead=narrowed)

        found = {}
        for bits in mean_bits:
            # Texts count where widths are mixed.
            name = f"v{_VERSION}-{bundle.fingerprint[:16]}-{bits:g}{'' if bits in BITS else '-' + digest}"
            found[bits] = made_once("shards", f"{name}.jaxllm", write=partial(write, bits=bits))
    return found


def _without_planes(model: Path) -> Path:
    """A bundle as it is; or where each weight lies in two planes, which no shard has, one of int8 weights
    with the same numbers but for rounding, made unless it is there."""
    with Bundle.open(model) as bundle:
        if bundle.layout.weights != "int8-nested":
            return model
        return made_once(
            "shards", f"v{_VERSION}-{bundle.fingerprint[:16]}-int8.jaxllm",
            write=lambda path: write_bundle(
                path, cfg=bundle.cfg, params=float_params(bundle).items(), weights="int8",
                tokenizer=bundle.tokenizer_files(), name=bundle.layout.name,
            ),
        )  # fmt: skip


def shard_importance(
    cfg: ModelConfig,
    params: Mapping[str, np.ndarray],
    texts: Sequence[Sequence[int]],
    bits: Bits,
    progress: Progress = silent,
) -> dict[str, float]:
    """The divergence (Kullback-Leibler, nats per token) of the model's predictions where one shard alone is
    narrowed, from those of the whole model, by shard."""
    rows = [list(each[:_TEXT_TOKENS]) for each in texts if each]
    tokens = np.zeros((len(rows), _TEXT_TOKENS), np.int32)
    counted = np.zeros((len(rows), _TEXT_TOKENS), bool)
    for row, text in enumerate(rows):
        tokens[row, : len(text)] = text
        counted[row, : len(text)] = True

    @jax.jit
    def predictions(params: dict[str, jax.Array]) -> jax.Array:
        hidden, _ = forward(params, jnp.asarray(tokens), cfg=cfg)
        return jax.nn.log_softmax(logits(params, hidden, cfg=cfg))

    @jax.jit
    def divergence(params: dict[str, jax.Array], whole: jax.Array) -> jax.Array:
        apart = jnp.sum(jnp.exp(whole) * (whole - predictions(params)), axis=-1)
        return jnp.sum(jnp.where(counted, apart, 0.0)) / np.float32(counted.sum())

    placed = {name: jnp.asarray(each) for name, each in params.items()}
    whole, specs, found = predictions(placed), param_specs(cfg), {}
    shards = shards_of(cfg)
    for number, (shard, names) in enumerate(shards.items()):
        narrowed = {
            name: dequantize(
                _narrowed(params[name], bits, contracted_axis(specs[name])), jnp.dtype(jnp.float32)
            )
            for name in names
        }
        found[shard] = float(divergence({**placed, **narrowed}, whole))
        progress("Measuring shards", number + 1, len(shards))
    return found


def _narrowed(value: np.ndarray, bits: Bits, axis: int) -> BlockedArray:
    return to_blocks(quantize(np.asarray(value, np.float32), bits=bits, axis=axis))
