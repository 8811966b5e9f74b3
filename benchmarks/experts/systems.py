"""Opens the systems that run a mixture of experts: ours, its ablations, and EdgeMoE's baselines.

All have the same buckets, reader and kernels; the glossary describes the baselines. Ours has a buffer for
experts; systems that load on demand have room for the experts of one token at one layer. STI (arXiv
2207.05022) has as much memory as ours takes.

The memory of each is measured in a process of its own.

Nested experts are measured beside IO-QEXP: time per token at equal buffer bytes, and what a loss costs. The
experts of the packaged mixture are read in a tenth of a millisecond, and routers of random weights are like
no trained ones. So each expert gets further neurons in pairs that read the same and write the opposite, and
so cancel: routers, and which experts a token visits, stay the trained ones, and experts have the size of
those of larger models.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.children import in_turns, taken_by
from benchmarks.harness.machine import Device
from benchmarks.harness.report import OURS, Row, compared, median_ratio_interval, row
from benchmarks.models import made_once
from benchmarks.peers.llama import content_key
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import copied_parts, expert_facts, read_path_counts
from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer, write_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.features import require_feature
from jaxllm.prepare import prepare
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.experts.store import ExpertStore
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.weight_source import budget_with_experts
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.speculation.tree import line_tree

_FLOAT_BITS = {"f32": 32, "bf16": 16}


def config_of(mixed: Sequence[Path]) -> ModelConfig:
    """The model that all bundles hold, with its experts stored separately."""
    found = set()
    for path in mixed:
        with Bundle.open(path) as bundle:
            require_feature(bundle.cfg, "separate experts")
            if not bundle.layout.experts_apart:
                raise ConfigError(
                    f"{path} stores its experts together; make a bundle by `jaxllm calibrate experts`"
                )
            found.add(bundle.cfg)
    if len(found) != 1:
        raise ConfigError("the bundles are of several models; give those that were made of one folder")
    return found.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is the same for all systems: tokens of a context, and the storage that experts are read from."""

    context_tokens: int
    storage: Storage

    def options(self, memory_bytes: int = 0) -> EngineOptions:
        """Of an engine."""
        return EngineOptions(
            context_tokens=self.context_tokens, chunk_tokens=(16, 64), cache_tokens=(self.context_tokens,),
            storage=self.storage, memory_bytes=memory_bytes,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Conditions):
    """The same model, memory and storage for all systems.

    Attributes:
      bundles: the model as each system needs it: "mixed", calibrated, with experts stored separately at their
        own widths; "floats", apart at the checkpoint's width; "four_bit", apart, all at 4 bits; "together",
        at the checkpoint's width with experts within layers, to be resident; "layers", all matrices at 4
        bits.
      buffer_experts: room of ours, in experts at 4 bits.
      equal: whether baselines that load on demand have a buffer of as many bytes as ours, from which those
        go that were used longest ago; else they have none.
    """

    bundles: Mapping[str, Path]
    buffer_experts: int
    equal: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedSetting(Conditions):
    """Nested experts, and the same at 4 bits, in as much memory.

    Attributes:
      nested: experts apart, in two planes.
      four_bit: experts apart, all at 4 bits.
      share: room for experts, as a share of all nested ones; the same bytes for all systems.
    """

    nested: Path
    four_bit: Path
    share: float

    @classmethod
    def of(cls, folder: Path, mixed: Path, **how: Any) -> "NestedSetting":
        """Of a mixture's folder, perhaps with wider experts than `mixed`; makes the bundles unless they are
        there. `how` has the other fields."""
        forms = {
            name: {"weights": "int8-nested", "expert_bits": bits}
            for name, bits in (("nested", 8), ("four-bit", 4))
        }
        nested, four_bit = _made(folder, mixed, forms).values()
        return cls(nested=nested, four_bit=four_bit, **how)

    @property
    def buffer_bytes(self) -> int:
        """Room for experts."""
        with Bundle.open(self.nested) as bundle:
            store = ExpertStore(bundle)
            return max(int(self.share * store.total_bytes), store.least_bytes())


def make_bundles(folder: Path, mixed: Path, progress: Progress = silent) -> dict[str, Path]:
    """The bundles of a mixture's Hugging Face folder, made unless they are there; `mixed` was made of it by
    `jaxllm calibrate experts`."""
    with Bundle.open(mixed) as bundle:
        weights = bundle.layout.weights
    bits = _FLOAT_BITS.get(weights, 16)
    forms: dict[str, dict[str, Any]] = {
        "floats": {"weights": weights, "expert_bits": bits},
        "four_bit": {"weights": weights, "expert_bits": 4},
        "together": {"weights": "f32" if bits == 32 else "bf16"},
        "layers": {"weights": "int4"},
    }
    return {"mixed": mixed, **_made(folder, mixed, forms, progress)}


def _made(
    folder: Path, mixed: Path, forms: Mapping[str, Mapping[str, Any]], progress: Progress = silent
) -> dict[str, Path]:
    """Bundles by name, of a folder in several forms; those with experts stored separately have the same
    statistics."""
    with Bundle.open(mixed) as bundle:
        parts, key = copied_parts(bundle), f"{bundle.fingerprint[:16]}-{content_key(folder)[:16]}"
    found = {}
    for name, how in forms.items():
        own = {**how, "parts": parts if "expert_bits" in how else None}
        write = partial(prepare, folder, progress=progress, **own)
        found[name] = made_once("experts", f"{key}-{name}.jaxllm", write=write)
    return found


def write_random_mixed(folder: Path, out: Path, progress: Progress = silent) -> None:
    """Writes the bundle of a mixture of random weights: every other expert has 2 bits, the others 4, for
    random weights cannot be calibrated."""
    cfg = read_config(folder)
    sparse = sum(map(cfg.is_sparse, range(cfg.layers)))
    bits = np.where(np.arange(sparse * cfg.experts) % 2, 2, 4).reshape(sparse, cfg.experts)
    prepare(folder, out, weights="int8", expert_bits=bits, progress=progress)


def opened(name: str, setting: Setting) -> Engine:
    """Opens a system by its name: a baseline's, or ours with the suffix of an ablation."""
    bundles = setting.bundles
    if name == EQUAL:
        return opened("IO-QEXP", dataclasses.replace(setting, equal=True))
    if name == "IO-FREE":
        return Engine.open(bundles["together"], options=setting.options())
    if name == "STI":
        with Bundle.open(bundles["mixed"]) as bundle:
            ours = _budget(bundle, setting.options(), _buffer_bytes(setting))
        return Engine.open(bundles["layers"], options=setting.options(memory_bytes=ours))
    room = 0 if name == f"{OURS}-no-buffer" else _buffer_bytes(setting)
    if name in ("IO-EXP", "IO-QEXP"):
        path = bundles["floats"] if name == "IO-EXP" else bundles["four_bit"]
        how = ExpertOptions(predictor="none", eviction="lru" if setting.equal else ExpertOptions.eviction)
        return _with_buffer(path, setting.options(), room if setting.equal else 0, how)
    path = bundles["four_bit"] if name == f"{OURS}-no-widths" else bundles["mixed"]
    # What an ablation changes.
    changes: Mapping[str, Mapping[str, Any]] = {
        f"{OURS}-no-preloading": {"predictor": "none"},
        f"{OURS}-paths": {"predictor": "paths"},
        f"{OURS}-tokens": {"predictor": "tokens"},
        f"{OURS}-lru": {"eviction": "lru"},
    }
    return _with_buffer(path, setting.options(), room, ExpertOptions(**changes.get(name, {})))


def resident(name: str, setting: Setting) -> Engine:
    """Opens what a system answers with, all in memory: the storage changes no answer."""
    of = {OURS: "mixed", "IO-FREE": "together", "IO-QEXP": "four_bit", "STI": "layers"}
    return Engine.open(setting.bundles[of[name]], options=setting.options())


def nested_engine(
    setting: NestedSetting, *, loss: float = 0.0, baseline: str = "", trees: TreeShape | None = None
) -> Engine:
    """Opens nested experts, or IO-QEXP.

    Args:
      loss: of nested experts (see `ExpertOptions`).
      baseline: "equal" for IO-QEXP that keeps the experts used last in as many bytes, "published" for one
        that keeps those of one token at one layer; "" for nested experts.
      trees: sizes of token trees, if there are any.
    """
    path = setting.four_bit if baseline else setting.nested
    how = ExpertOptions(predictor="none", eviction="lru") if baseline else ExpertOptions(loss=loss)
    room = 0 if baseline == "published" else setting.buffer_bytes
    # Of its own: another system's reads delay none of this one's.
    storage = dataclasses.replace(setting.storage)
    options = dataclasses.replace(setting.options(), trees=trees, storage=storage)
    return _with_buffer(path, options, room, how)


EQUAL = "IO-QEXP, our buffer"
SYSTEMS = (OURS, "IO-FREE", "IO-EXP", "IO-QEXP", "STI")
# Whose weights at 4 bits are made of the checkpoint, not of our bundle.
FOUR_BIT = ("IO-QEXP", EQUAL, "STI", f"{OURS}-no-widths")


def ablations(bundle: Bundle) -> tuple[str, ...]:
    """Names of our ablations on a bundle; predictors by statistics need those in it."""
    known = ("paths", "tokens") if read_path_counts(bundle).alone.any() else ()
    return tuple(f"{OURS}-{what}" for what in ("no-widths", "no-preloading", "no-buffer", "lru", *known))


def widths_of(path: Path) -> str:
    """How many of a bundle's experts have each width, and whether anything was measured for it."""
    with Bundle.open(path) as bundle:
        store = ExpertStore(bundle)
        keys = itertools.product(range(len(store.layers)), range(store.experts))
        counts = Counter(store[key].bits for key in keys)
        chosen = "calibrated" if expert_facts(bundle) else "by no calibration"
    total = sum(counts.values())
    shares = ", ".join(f"{counts[bits] / total:.0%} at {bits} bits" for bits in sorted(counts, reverse=True))
    return f"experts: {shares}, {chosen}"


def _buffer_bytes(setting: Setting) -> int:
    with Bundle.open(setting.bundles["four_bit"]) as bundle:
        return setting.buffer_experts * ExpertStore(bundle).largest_bytes


def _with_buffer(path: Path, options: EngineOptions, buffer_bytes: int, how: ExpertOptions) -> Engine:
    with Bundle.open(path) as bundle:
        store = ExpertStore(bundle)
        # At least the experts of a token, and never all of them: then nothing would be read.
        room = min(max(buffer_bytes, store.least_bytes()), store.total_bytes - store.largest_bytes)
        budget = _budget(bundle, options, room)
    return Engine.open(path, options=dataclasses.replace(options, memory_bytes=budget, experts=how))


def _budget(bundle: Bundle, options: EngineOptions, buffer_bytes: int) -> int:
    quantized = bundle.layout.weights not in _FLOAT_BITS
    return budget_with_experts(bundle, options.resolve(bundle.cfg, quantized=quantized), buffer_bytes)


@dataclasses.dataclass
class Measured:
    """Of one system: times of each answer that is counted, and counts of all of them.

    Attributes:
      token_ms: per token after the first, of each answer that has several.
      encode_ms: until a source has been read, of encoder-decoders.
      prompts, tokens: that were answered.
      counts: `read_bytes`, `visits` and `hits` of experts, `calls` of kernels; and with the index of a sparse
        layer its "visits", "hits" and "loads". None where layers are read whole.
    """

    token_ms: list[float] = dataclasses.field(default_factory=list)
    encode_ms: list[float] = dataclasses.field(default_factory=list)
    prompts: int = 0
    tokens: int = 0
    counts: Counter[Any] = dataclasses.field(default_factory=Counter)


def measured(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    config: Callable[[int], GenerationConfig],
) -> dict[str, Measured]:
    """Times answers of all systems in turns, over the same prompts, of which the first warms up."""
    found = {name: Measured() for name in engines}
    clocks = {name: _timed_encoding(each) for name, each in engines.items() if each.cfg.encoder is not None}
    for number, prompt, name in in_turns(engines, prompts):
        engine, each = engines[name], found[name]
        before = _counts(engine)
        answer = engine.generate(list(prompt), config(number))
        encoded = clocks.get(name, [])
        # The first answer warms up: code runs for the first time, and expert buffers are empty.
        if number:
            each.encode_ms += encoded
        encoded.clear()
        if not number:
            continue
        if len(answer.tokens) > 1:
            each.token_ms.append(answer.timings.tpot_ms(len(answer.tokens)))
        each.prompts += 1
        each.tokens += len(answer.tokens)
        each.counts.update(_counts(engine) - before)
    return found


def sampled(tokens: int) -> Callable[[int], GenerationConfig]:
    """How answers of so many tokens are drawn: a greedy one of random weights repeats one token, and visits
    the same experts."""
    return lambda number: GenerationConfig(
        max_tokens=tokens, ignore_eos=True, sampling=Sampling(temperature=1.0, seed=number)
    )


def _timed_encoding(engine: Engine) -> list[float]:
    """Has an engine note how long it reads each source, in ms, in the list that is returned."""
    found: list[float] = []
    runner: Any = engine.runner
    read = runner.read_source

    def timed(cache: Any, tokens: Sequence[int]) -> Any:
        began = time.perf_counter()
        # What is dispatched shall be done.
        cache = jax.block_until_ready(read(cache, tokens))
        found.append(1e3 * (time.perf_counter() - began))
        return cache

    runner.read_source = timed
    return found


def _counts(engine: Engine) -> Counter[Any]:
    """So far; see `Measured`."""
    counts: Any = getattr(engine.model.streamed, "counts", None)
    names = ("read_bytes", "visits", "hits")
    found: Counter[Any] = Counter({name: getattr(counts, name, 0) for name in names})
    visits = getattr(getattr(engine.runner, "layers", None), "visits", None)
    found["calls"] = getattr(visits, "calls", 0)
    for layer, (visited, hit) in getattr(counts, "layers", {}).items():
        found["visits", layer], found["hits", layer] = visited, hit
    for key, count in getattr(counts, "loads", {}).items():
        found["loads", key[0]] += count
    return found


def memory_rows(names: Sequence[str], setting: Setting, case: str) -> list[Row]:
    """Peak of resident memory of each system above that of Python and JAX, while it is opened and answers.

    Compiling takes memory of its own: systems have been opened before, so that their buckets are on disk.
    """
    found = {name: taken_by(_answered, name, setting) for name in names}
    notes: dict[str, str | None] = {
        name: f"measured, above {each.idle_bytes / 1e6:,.0f} MB of Python and JAX; "
        + (f"planned {each.found / 1e6:,.0f} MB" if each.found else "all in memory")
        for name, each in found.items()
    }
    peaks = {name: float(each.peak_bytes) for name, each in found.items()}
    return compared(case, "peak_memory_bytes", peaks, notes)


def _answered(name: str, setting: Setting) -> int:
    """Answers with a system in this process: the bytes of its plan, 0 where all is in memory."""
    engine = opened(name, setting)
    count = min(24, setting.context_tokens - 9)
    prompt = (np.arange(count) % engine.cfg.vocab_size).tolist()
    engine.generate(prompt, sampled(9)(0))
    streamed = engine.model.streamed
    planned = 0 if streamed is None else int(streamed.facts()["planned_bytes"])
    engine.close()
    return planned


LOSSES = (0.0, 0.35, 0.5, 1.0)
BASELINE = "IO-QEXP"
# The baseline as published keeps the experts of one token at one layer.
BUFFERS = {"equal": "a buffer of as many bytes", "published": "no buffer, as published"}


def nested_rows(
    setting: NestedSetting, device: Device, prompts: Sequence[Sequence[int]], tokens: int
) -> list[Row]:
    """Times all systems in turns, over the same prompts.

    Args:
      setting: the bundles and the buffer.
      device: that experts are read from.
      prompts: of which the first warms up.
    """
    engines = {f"{OURS} {loss}": nested_engine(setting, loss=loss) for loss in LOSSES}
    engines |= {name: nested_engine(setting, baseline=name) for name in BUFFERS}
    found = measured(engines, prompts, sampled(tokens))
    rows = []
    for loss, (name, buffer) in itertools.product(LOSSES, BUFFERS.items()):
        ours, theirs = found[f"{OURS} {loss}"], found[name]
        low, high = median_ratio_interval(ours.token_ms, theirs.token_ms)
        notes = {
            OURS: f"{device.note}; {_facts(ours)}; ratio's 95 % interval [{low:.2f}, {high:.2f}]",
            BASELINE: f"{device.note}; {buffer}; {_facts(theirs)}",
        }
        times = {OURS: median(ours.token_ms), BASELINE: median(theirs.token_ms)}
        shown = "exact" if not loss else f"loss {loss:.0%}"
        case = f"nested, {shown}, {setting.share:.0%} in memory, IO-QEXP with {buffer}: {device.name}"
        rows += compared(case, "tpot_ms", times, notes)
    for each in engines.values():
        each.close()
    return rows


def quality_of_losses(setting: NestedSetting, windows: Sequence[Sequence[int]]) -> list[Row]:
    """Perplexity and agreement with both planes by loss, and of experts at 4 bits; none without windows of
    text, as for random weights."""
    rows, exact = [], None
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        f"nested, loss {loss:.0%}": (OURS, {"loss": loss}) for loss in LOSSES
    }
    cases["experts at 4 bits"] = BASELINE, {"baseline": "equal"}
    for case, (system, how) in cases.items() if windows else ():
        engine = nested_engine(setting, trees=TREES, **how)
        perplexity, likeliest = predicted(engine, windows)
        engine.close()
        exact = likeliest if exact is None else exact
        case = f"{case}: {len(likeliest):,} tokens"
        rows.append(row(case, "perplexity", perplexity, system=system))
        rows.append(row(case, "agreement", float((likeliest == exact).mean()), system=system))
    return rows


def text_windows(ids: Sequence[int], count: int) -> list[list[int]]:
    """Windows of a text for `quality_rows`, as many as there are, evenly spread."""
    size = PROMPT + NODES + 1
    starts = np.linspace(0, len(ids) - size, max(1, min(count, len(ids) // size))).astype(int)
    return [list(ids[start : start + size]) for start in starts]


def _facts(each: Measured) -> str:
    read, calls = (each.counts[name] / max(1, each.tokens) for name in ("read_bytes", "calls"))
    hits = each.counts["hits"] / max(1, each.counts["visits"])
    what = f"{read / 1e6:.2f} MB and {calls:.1f} calls a token (prompts among them)"
    return f"{what}, {hits:.0%} of visits in memory"


_VERSION = 1


def widened_folder(folder: Path, times: int, progress: Progress = silent) -> Path:
    """The folder of a mixture whose experts have `times` as many neurons, made unless it is there."""
    cfg = read_config(folder)
    added = (times - 1) * cfg.expert_ffn_size
    if times < 2 or not cfg.experts or added % 2:
        raise ConfigError(
            "experts are widened 2 times and more, by an even number of neurons; got "
            f"{times} times, {cfg.experts} experts, {added} neurons"
        )

    def write(path: Path) -> None:
        params: dict[str, np.ndarray] = {}
        for number, (name, value) in enumerate(read_params(folder, cfg)):
            whole = np.asarray(value, np.float32)
            if ".experts." in name:
                # Of a stack `[E, F, D]` each second further neuron cancels the one before.
                draw = np.random.default_rng((_VERSION, number))
                new = np.zeros((len(whole), added, whole.shape[2]), np.float32)
                new[:, ::2] = whole.std() * draw.standard_normal(new[:, ::2].shape, np.float32)
                new[:, 1::2] = new[:, ::2] * np.float32(-1 if name.endswith(".down") else 1)
                whole = np.concatenate([whole, new], axis=1)
            params[name] = whole
            progress("Widening experts", number + 1, 0)
        write_tokenizer(path, read_tokenizer(folder))
        neurons = times * cfg.expert_ffn_size
        # Of a model without dense layers some checkpoints know one number alone.
        dense = cfg.ffn_size if not all(cfg.is_sparse(layer) for layer in range(cfg.layers)) else neurons
        write_folder(path, dataclasses.replace(cfg, expert_ffn_size=neurons, ffn_size=dense), params)

    return made_once("experts", f"widened-v{_VERSION}-{content_key(folder)}-{times}", write=write)


PROMPT, NODES = 16, 64
TREES = TreeShape(nodes=(NODES,), room=NODES)


def predicted(engine: Engine, windows: Sequence[Sequence[int]]) -> tuple[float, np.ndarray]:
    """Predicts text token by token with a mixture whose experts are streamed: the perplexity, and `[T]` int,
    what is found likeliest.

    The tokens of a window are the nodes of a tree of one branch, which gives each to the bit what decoding
    gives it.

    Args:
      engine: with the tree shapes `TREES`.
      windows: of `PROMPT` + `NODES` + 1 tokens.
    """
    # Layer by layer, for experts are streamed.
    runner: Any = engine.runner
    runner.fill(runner.buckets_for(PROMPT, NODES, trees=[NODES]))
    loss, likeliest = 0.0, list[np.ndarray]()
    for window in windows:
        start = runner.start(runner.cache_for(PROMPT + NODES))
        _, cache = prefill_prompt(runner, start, list(window[:PROMPT]), 0)
        logits, _ = runner.tree_logits(line_tree(window[PROMPT:-1]), cache)
        targets = np.asarray(window[PROMPT + 1 :])
        logs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))
        loss -= float(logs[np.arange(NODES), targets].sum(dtype=np.float64))
        likeliest.append(logs.argmax(-1))
    return float(np.exp(loss / (NODES * len(windows)))), np.concatenate(likeliest)
