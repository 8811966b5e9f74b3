"""Measures nested experts beside IO-QEXP: time per token at equal buffer bytes, and what a loss costs.

The experts of the packaged mixture are read in a tenth of a millisecond, and routers of random weights are
like no trained ones. So each expert gets further neurons in pairs that read the same and write the opposite,
and so cancel: routers, and which experts a token visits, stay the trained ones, and experts have the size of
those of larger models.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.experts.systems import Measured, NestedSetting, measured, nested_engine, sampled
from benchmarks.harness.bench import silent
from benchmarks.harness.machine import Device
from benchmarks.harness.report import OURS, Row, compared, median, median_ratio_interval, row
from benchmarks.models import made_once
from benchmarks.peers.llama import content_key
from jaxllm.checkpoints.huggingface import read_config, read_params, write_folder
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer, write_tokenizer
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.speculation.tree import line_tree

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
    """A Hugging Face folder of a mixture whose experts have `times` as many neurons, made unless it is there.

    Args:
      times: at least 2.
      progress: called with ("Widening experts", parameters done, parameters in all).

    Raises:
      ConfigError: the model has no experts, or an odd number of neurons would be added.
    """
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
            params[name] = _wider(name, whole, added, number) if ".experts." in name else whole
            progress("Widening experts", number + 1, 0)
        write_tokenizer(path, read_tokenizer(folder))
        neurons = times * cfg.expert_ffn_size
        # Of a model without dense layers some checkpoints know one number alone.
        dense = cfg.ffn_size if not all(cfg.is_sparse(layer) for layer in range(cfg.layers)) else neurons
        write_folder(path, dataclasses.replace(cfg, expert_ffn_size=neurons, ffn_size=dense), params)

    return made_once("experts", f"widened-v{_VERSION}-{content_key(folder)}-{times}", write=write)


def _wider(name: str, stack: np.ndarray, added: int, seed: int) -> np.ndarray:
    """A stack `[E, F, D]` with further neurons, of which each second one cancels the one before."""
    draw = np.random.default_rng((_VERSION, seed))
    experts, _, width = stack.shape
    new = np.zeros((experts, added, width), np.float32)
    new[:, ::2] = stack.std() * draw.standard_normal(new[:, ::2].shape, np.float32)
    new[:, 1::2] = new[:, ::2] * np.float32(-1 if name.endswith(".down") else 1)
    return np.concatenate([stack, new], axis=1)


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
