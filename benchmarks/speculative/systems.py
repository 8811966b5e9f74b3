"""Opens the systems that run a model larger than memory: ours, its ablations, and LLMCad's baselines.

All have the same buckets, reader and memory for weights: a draft leaves less room for layers.

- Std: each layer is read when it is needed, then computed, for every token.
- StdPL: the next layer is read while one is computed.
- STI (arXiv 2207.05022): the pipeline over weights of fewer bits, here 4; its answers differ.
- SP (arXiv 2211.17192): a draft of a fixed number of tokens in a line, then one verification.
- BLD (arXiv 2302.07863): a small model answers until it is unsure, the large one rejects tokens that it finds
  too unlikely; its answers differ.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import WHOLE
from jaxllm.kv.cache import KVCache
from jaxllm.sampling import SamplerState
from jaxllm.speculative.fallback import LEAST
from jaxllm.speculative.tree import TokenTree
from serving.bundles import open_model
from serving.engine import Engine
from serving.host.direct_io import Storage
from serving.loading import LoadedModel
from serving.options import EngineOptions
from serving.runners.layerwise import LayerwiseRunner
from serving.runners.verdict import Verdict
from serving.speculation.drafter import Drafter, Growing
from serving.speculation.drafters import make_drafter
from serving.speculation.options import SpeculationOptions, TreeShape
from serving.speculation.speculation import Speculation
from serving.weights.footprint import drafter_bytes, fixed_bytes, whole_budget
from serving.weights.prefetch import Meanwhile

OURS, STDPL, STI = "jaxllm", "StdPL", "STI"
# Lengths of SP's drafts; the best one, on prompts that are not counted, is shown.
SP_LENGTHS = (2, 4, 7)
# BLD's thresholds: the least probability at which the small model goes on alone, and the most nats of a token
# that the large one accepts. They are in the middle of the ranges that its paper tunes in.
_BLD_FALLBACK, _BLD_ROLLBACK, _BLD_LENGTH = 0.6, 3.0, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The same models, memory and storage for all systems.

    Attributes:
      model: the target, a bundle.
      draft: a small model of its tokenizer.
      narrow: the target at 4 bits, for STI; None where no baselines are opened.
      weights_bytes: memory for weights, the draft's included; caches and activations come on top.
      context_tokens: of every context.
      storage: that weights are read from.
    """

    model: Path
    draft: Path
    narrow: Path | None
    weights_bytes: int
    context_tokens: int
    storage: Storage


Opener = Callable[[Setting], Engine]


def plain(setting: Setting, *, read_ahead: bool = True, model: Path | None = None) -> Engine:
    """An engine without a draft."""
    model = model or setting.model
    return Engine.open(model, options=_options(setting, model, read_ahead=read_ahead))


def drafted(setting: Setting, **speculation: object) -> Engine:
    """An engine with a draft."""
    options = SpeculationOptions(**{"model": setting.draft, **speculation})  # pyright: ignore
    return Engine.open(setting.model, options=_options(setting, setting.model, options), speculation=options)


def fixed_lines(setting: Setting, length: int) -> Engine:
    """SP with drafts of `length` tokens."""
    trees = TreeShape(nodes=(length + 1,), room=length + 1, tips=1, branches=1)
    return drafted(
        setting, trees=trees, alpha=LEAST, fallback="fixed", pipelined=False, pausing=False, lookup=False
    )


def big_little(setting: Setting) -> Engine:
    """BLD."""
    nodes = _BLD_LENGTH + 1
    options = SpeculationOptions(
        model=setting.draft,
        trees=TreeShape(nodes=(nodes,), room=nodes + 1, tips=1, branches=1),
        fallback="fixed",
        pipelined=False,
        pausing=False,
        lookup=False,
    )
    engine_options = dataclasses.replace(_options(setting, setting.model, options), trees=options.trees)
    bundle = open_model(setting.model)
    reserved = drafter_bytes(options, setting.context_tokens, bundle.cfg)
    model = LoadedModel(bundle, engine_options, reserved_bytes=reserved)
    drafter = _UntilUnsure(make_drafter(model, WHOLE, options))
    target: Any = model.runner(WHOLE)
    engine = Engine(model, WHOLE, BigLittle(target, drafter, options))
    engine.warm_up()
    return engine


def systems(*, baselines: bool = True, ablations: bool = True) -> dict[str, Opener]:
    """What opens each system, by name, ours first; SP is not among them (see `fixed_lines`).

    Args:
      baselines: whether those of LLMCad are among them.
      ablations: whether ours without each technique in turn is.
    """
    tree = TreeShape()
    found: dict[str, Opener] = {OURS: drafted}
    if baselines:
        found |= {
            "Std": lambda s: plain(s, read_ahead=False),
            STDPL: plain,
            "BLD": big_little,
            STI: lambda s: plain(s, model=s.narrow),
        }
    if not ablations:
        return found
    return found | {
        f"{OURS}-no-tree": lambda s: drafted(s, trees=dataclasses.replace(tree, branches=1)),
        f"{OURS}-no-pacer": lambda s: drafted(s, trees=dataclasses.replace(tree, paced=False)),
        f"{OURS}-learned-fallback": lambda s: drafted(s, fallback="learned"),
        f"{OURS}-no-fallback": lambda s: drafted(s, fallback="fixed"),
        f"{OURS}-no-pipeline": lambda s: drafted(s, pipelined=False),
        f"{OURS}-no-lookup": lambda s: drafted(s, lookup=False),
        f"{OURS}-ngram": lambda s: drafted(s, drafter="ngram", model=None),
    }


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

    memory = None

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.step_s, self.steps = 0.0, 0
        self.warm_up, self.step, self.follow = drafter.warm_up, drafter.step, drafter.follow

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; alpha, a bound for whole paths, is not used."""
        return self._grown(sequence, root, growing.most, cache), cache

    def _grown(self, sequence: Sequence[int], root: int, most: int, cache: Any) -> TokenTree:
        def longer(alpha: float, most: int) -> TokenTree:
            return self._drafter.grow(sequence, root, Growing(alpha, most), cache)[0]

        tree = longer(LEAST, 2)
        while (count := int(tree.count)) <= most:
            whole = float(tree.confidences[count - 2]) if count > 1 else 1.0
            if count < 2 or float(tree.confidences[count - 1]) < _BLD_FALLBACK * whole:
                break
            if count == most:
                return tree
            tree = longer(1e-30, count + 1)
            if int(tree.count) == count:
                return tree
        return dataclasses.replace(tree, count=np.int32(max(1, int(tree.count) - 1)))  # pyright: ignore


class BigLittle(Speculation):
    """Accepts drafted tokens that the large model does not find too unlikely; greedy alone."""

    def __init__(self, target: LayerwiseRunner, drafter: Drafter, options: SpeculationOptions) -> None:
        super().__init__(_Lenient(target), drafter, options)  # pyright: ignore[reportArgumentType]


class _Lenient:
    """A target that accepts all drafted tokens that it does not find too unlikely."""

    def __init__(self, target: LayerwiseRunner) -> None:
        self._target = target

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
            if len(said) + 1 >= limit or -likely[node - 1, tokens[node]] > _BLD_ROLLBACK:
                break
            said.append(int(tokens[node]))
            path.append(node)
        said.append(int(likely[path[-1]].argmax()))
        nodes = np.full(tree.room, path[-1], np.int32)
        nodes[: len(path)] = path
        cache = self._target.keep_path(cache, nodes, len(path))
        return Verdict.of(np.array(said, np.int32), len(said), path), cache, sampler
