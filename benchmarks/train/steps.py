"""Measures steps of training: tokens per second, share of the device's peak (MFU), peak memory.

Models have a size and random weights, drawn on the device; rows are random documents. Checks attention within
packed documents on the device: outputs, gradients and borders, against float32.

Kills a training run on the device, by SIGTERM and by kill -9, and compares what resumes with one that was
never stopped. Measures serving on the device by the service's own commands, in processes of their own.
"""

import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.children import run_python
from benchmarks.harness.report import Row, row
from benchmarks.models import shape
from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.elastic.ladder import Ladder
from jaxllm.errors import JaxllmError
from jaxllm.models.parameters import ParamSpec, init_param, init_params, param_specs
from jaxllm.models.scanned_layers import Remat, stacked
from jaxllm.nn.documents import document_attention, document_mask
from jaxllm.nn.layers import AttentionOptions, attention
from jaxllm.quant.blocks import BlockedArray, blocked_shapes
from jaxllm.training.data.rows import Batch
from jaxllm.training.data.sources import Source
from jaxllm.training.decoders import LoraRecipe, PretrainRecipe, lora_job, pretrain_job
from jaxllm.training.elastic.importance import unit_step
from jaxllm.training.elastic.job import joint_job
from jaxllm.training.loop.hardware import known_device, peak_memory_bytes, step_flops_per_token
from jaxllm.training.loop.parallel import MeshShape, make_mesh, place_rows, stacks_layers
from jaxllm.training.loop.trainer import Job, Preempted, Trainer, train
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and the rows of a step."""

    cfg: ModelConfig
    batch: int
    row_tokens: int


def _size(D: int, L: int, N: int, K: int, F: int, V: int, batch: int, row_tokens: int) -> Size:
    more = {"window_tokens": 8192, "norm_eps": 1e-5, "rope": RopeConfig(dim=D // N, theta=5e5)}
    cfg = shape(D=D, L=L, N=N, K=K, H=D // N, F=F, V=V, **more)
    return Size(cfg=cfg, batch=batch, row_tokens=row_tokens)


SIZES = {
    # For trying the script on a CPU.
    "tiny": _size(64, 2, 4, 2, 128, 288, 2, 128),
    "60m": _size(512, 12, 8, 8, 1408, 32000, 16, 2048),
    "350m": _size(1024, 24, 8, 8, 2816, 32000, 16, 2048),
    "1b": _size(2048, 16, 16, 8, 8192, 128256, 4, 4096),
    "8b": _size(4096, 32, 32, 8, 14336, 128256, 2, 4096),
}


def random_batch(size: Size, seed: int = 0) -> Batch:
    """Rows `[B, T]` of documents of 50 to 1,000 random tokens."""
    draw = np.random.default_rng(seed)
    shape = size.batch, size.row_tokens
    ids = draw.integers(0, size.cfg.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
    starts = np.zeros(shape, np.int32)
    for own in starts:
        at = 0
        while at < len(own):
            own[at:] = at
            at += int(draw.integers(50, 1000))
    weights = np.ones(shape, np.float32)
    # The token after a document's last is the next one's first.
    weights[:, :-1] = starts[:, 1:] == starts[:, :-1]
    return Batch(ids[:, :-1], ids[:, 1:], starts, weights, np.zeros(shape, np.int32))


def dense_params(cfg: ModelConfig, dtype: Any, *, stack: bool) -> dict[str, jax.Array]:
    """Random parameters, drawn on the device by one compiled function."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        params = init_params(cfg, key, dtype)
        return stacked(params, cfg) if stack else params

    return jax.jit(draw)(jax.random.key(0))


def four_bit_params(cfg: ModelConfig, *, stack: bool) -> dict[str, Any]:
    """Random weights of 4 bits in the form of a bundle's `int4`, drawn on the device; embeddings have 8."""
    specs = param_specs(cfg)

    def draw(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, len(specs))
        params = {
            name: _drawn(cfg, name, spec, own) for (name, spec), own in zip(specs.items(), keys, strict=True)
        }
        return stacked(params, cfg) if stack else params

    return jax.jit(draw)(jax.random.key(0))


def _drawn(cfg: ModelConfig, name: str, spec: ParamSpec, key: jax.Array) -> Any:
    if spec.role == "vector":
        return init_param(cfg, name, key, jnp.dtype(jnp.float32))
    bits, group = (8, 0) if spec.role == "embed" else (4, 32)
    axis = contracted_axis(spec)
    data, scale = blocked_shapes(spec.shape, bits=bits, group=group, axis=axis)
    # So that products are of order one: the deviation of equally likely levels is 2^bits / sqrt(12).
    deviation = np.prod(spec.shape[:-1] if axis == -2 else spec.shape[-1:]) ** -0.5 * 12**0.5 / 2**bits
    levels = jax.random.bits(key, data, jnp.uint8)
    return BlockedArray(
        data=levels if bits == 4 else jax.lax.bitcast_convert_type(levels, jnp.int8),
        scale=jnp.full(scale, deviation, jnp.float16 if group else jnp.float32),
        bits=bits,
        group=group,
        axis=axis,
        shape=tuple(spec.shape),
    )


def median_s(step: Callable[[], Any], repetitions: int, *, warm_steps: int) -> float:
    """Median time of a step in seconds, until its results are there; the first of the warm ones compiles."""
    for _ in range(warm_steps):
        jax.block_until_ready(step())
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        jax.block_until_ready(step())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# Before the measured ones; the first compiles.
_WARM_STEPS = 2


def measure_pretraining(name: str, remat: Remat, optimizer: str, repetitions: int) -> list[Row]:
    """Steps of a new model, all weights trained."""
    size = SIZES[name]
    settings: Any = {**_settings(size, remat), "optimizer": optimizer}
    recipe = PretrainRecipe(**settings, model=size.cfg)
    return _trained(
        f"pretrain {name} {optimizer} remat={remat}", size, recipe, pretrain_job(recipe), repetitions
    )


def measure_lora(name: str, weights: str, repetitions: int) -> list[Row]:
    """Steps of an adapter of rank 16 over random weights of bfloat16 or 4 bits."""
    size = SIZES[name]
    recipe = LoraRecipe(**_settings(size, "full"), sources=(Source(text="text.txt"),))
    stack = _stacks()
    if weights == "int4":
        frozen = four_bit_params(size.cfg, stack=stack)
    else:
        frozen = dense_params(size.cfg, jnp.bfloat16, stack=stack)
    job = lora_job(size.cfg, frozen, recipe)
    del frozen
    return _trained(f"lora {name} over {weights}", size, recipe, job, repetitions)


def measure_importance(name: str, repetitions: int) -> list[Row]:
    """The backward pass that importance of units is read from."""
    size, mesh = SIZES[name], _mesh()
    params = dense_params(size.cfg, jnp.bfloat16, stack=_stacks())
    step = unit_step(size.cfg, mesh, remat="full")
    with jax.set_mesh(mesh):
        rows = jax.tree.map(lambda part: part[0], place_rows(random_batch(size), mesh, 1))
        took_s = median_s(lambda: step(params, rows), repetitions, warm_steps=_WARM_STEPS)
    return _rows(f"importance {name}", size, took_s, step_flops_per_token(size.cfg, size.row_tokens))


def measure_joint(name: str, bound: bool, repetitions: int) -> list[Row]:
    """Steps of joint recovery of all levels, with `bound` within reach of the model before."""
    size = SIZES[name]
    settings = TrainSettings(**_settings(size, "full"))
    params = dense_params(size.cfg, jnp.float32, stack=_stacks())
    original = dense_params(size.cfg, jnp.bfloat16, stack=_stacks()) if bound else None
    job = joint_job(size.cfg, params, Ladder(), settings, original=original)
    del params, original
    case = f"joint recovery {name}" + (" with --whole-kl" if bound else "")
    return _trained(case, size, settings, job, repetitions)


def _settings(size: Size, remat: Remat) -> dict[str, Any]:
    return {
        "steps": 1000, "batch": size.batch, "row_tokens": size.row_tokens, "peak_learning_rate": 1e-4,
        "warmup_steps": 10, "precision": "bfloat16", "remat": remat,
    }  # fmt: skip


def _mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshShape(data=1), 1)


def _stacks() -> bool:
    return stacks_layers(_mesh())


def _trained(case: str, size: Size, settings: TrainSettings, job: Job, repetitions: int) -> list[Row]:
    trainer = Trainer(job, settings, _mesh())
    batch, states = random_batch(size), [trainer.initial()]

    def step() -> Any:
        # The state is donated: the next step starts from what this one returns.
        state, measures = trainer.step(states.pop(), batch)
        states.append(state)
        return measures

    took_s = median_s(step, repetitions, warm_steps=_WARM_STEPS)
    rows = _rows(case, size, took_s, job.flops_per_token)
    return [*rows, row(case, "build_ms", trainer.compile_s * 1e3)]


def _rows(case: str, size: Size, took_s: float, flops_per_token: float | None) -> list[Row]:
    tokens_per_s = size.batch * size.row_tokens / took_s
    rows = [
        row(case, "train_tokens_per_s", tokens_per_s),
        row(case, "peak_memory_bytes", peak_memory_bytes()),
    ]
    device = known_device(jax.devices()[0].device_kind)
    if device is not None and flops_per_token is not None:
        rows.append(row(case, "mfu", tokens_per_s * flops_per_token / device.flops))
    return rows


# Borders inside and at the edges of a kernel's blocks, a document of one token, one of several blocks.
BORDERS = (0, 37, 128, 129, 250, 512, 1000)
# Of q, k, v and starts.
Compute = Callable[..., jax.Array]


def check_attention(tokens: int, heads: int, kv_heads: int, width: int, repetitions: int) -> list[Row]:
    """Rows of errors and of time.

    Args:
      tokens: T of the sequence that is timed; at most 1,024 of it are compared with the plain attention.
    """
    compared = min(tokens, 1024)
    case = f"attention T={compared} N={heads} K={kv_heads} H={width}"
    options = AttentionOptions(scale=width**-0.5)
    ours = functools.partial(document_attention, options=options)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array) -> jax.Array:
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return attention(q, keys, values, document_mask(starts, 0), scale=width**-0.5)

    given, starts, cotangent = _attention_inputs(compared, heads, kv_heads, width)
    with jax.default_matmul_precision("highest"):
        wanted = _outputs_and_gradients(plain, given, starts, cotangent)
    half = [each.astype(jnp.bfloat16) for each in given]
    found = _outputs_and_gradients(ours, half, starts, cotangent.astype(jnp.bfloat16))
    rows = []
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        error = float(_norm(one - other) / _norm(other))
        rows.append(row(case, f"relative_error_{name}", error, "of bfloat16 to float32"))
    inside = slice(BORDERS[1], BORDERS[2])
    asked = jnp.zeros_like(cotangent).at[:, inside].set(cotangent[:, inside])
    crossed = 0.0
    for gradient in _outputs_and_gradients(ours, half, starts, asked.astype(jnp.bfloat16))[1:]:
        outside = np.array(gradient)
        outside[:, inside] = 0
        crossed = max(crossed, float(np.abs(outside).max()))
    rows.append(row(case, "gradient_across_borders", crossed, "must be 0"))
    return rows + _timed(ours, tokens, heads, kv_heads, width, repetitions)


def _timed(ours: Compute, tokens: int, heads: int, kv_heads: int, width: int, repetitions: int) -> list[Row]:
    given, starts, cotangent = _attention_inputs(tokens, heads, kv_heads, width)
    half, out = [each.astype(jnp.bfloat16) for each in given], cotangent.astype(jnp.bfloat16)
    step = jax.jit(functools.partial(_outputs_and_gradients, ours))
    took_s = median_s(lambda: step(half, starts, out), repetitions, warm_steps=1)
    case = f"attention T={tokens} N={heads} K={kv_heads} H={width}"
    rows = [row(case, "step_ms", took_s * 1e3, "forward and backward")]
    device = known_device(jax.devices()[0].device_kind)
    if device is not None:
        # Half of the scores are causal; the backward pass is 2.5 forward passes of 2 products.
        flops = 3.5 * 2 * 2 * given[0].shape[0] * tokens * tokens * heads * width / 2
        share = flops / took_s / device.flops
        rows.append(row(case, "mfu", share, "as if rows were one document each"))
    return rows


def _attention_inputs(
    tokens: int, heads: int, kv_heads: int, width: int
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    queries, pairs = (2, tokens, kv_heads, heads // kv_heads, width), (2, tokens, kv_heads, width)
    given = [jax.random.normal(key, shape) for key, shape in zip(keys, (queries, pairs, pairs), strict=False)]
    starts = np.zeros((2, tokens), np.int32)
    for border in BORDERS:
        starts[:, border:] = border
    return given, jnp.asarray(starts), jax.random.normal(keys[3], queries)


def _outputs_and_gradients(
    compute: Compute, given: Sequence[jax.Array], starts: jax.Array, cotangent: jax.Array
) -> list[jax.Array]:
    out, pull = jax.vjp(lambda *given: compute(*given, starts), *given)
    return [each.astype(jnp.float32) for each in (out, *pull(cotangent))]


def _norm(value: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(value.astype(jnp.float32))))


STEPS, CHECKPOINT_STEPS = 12, 4
_WAIT_S = 240


def train_here(name: str, folder: Path) -> None:
    """Trains in a folder, from its newest checkpoint, and leaves the parameters there."""
    size = SIZES[name]
    recipe = PretrainRecipe(
        model=size.cfg, steps=STEPS, batch=size.batch, row_tokens=size.row_tokens, peak_learning_rate=1e-3,
        warmup_steps=2, precision="bfloat16", remat="dots", checkpoint_steps=CHECKPOINT_STEPS, log_steps=1,
    )  # fmt: skip
    trainer = Trainer(pretrain_job(recipe), recipe, make_mesh(MeshShape(data=1), 1))
    held_out = random_batch(dataclasses.replace(size, batch=1), seed=99)

    report = functools.partial(print, flush=True)
    batches, checkpoints = functools.partial(random_batch, size), folder / "checkpoints"
    try:
        state = train(trainer, batches, lambda: [held_out], checkpoints, report)
    except Preempted:
        return
    params = {name: np.asarray(value) for name, value in trainer.whole(state.params).items()}
    np.savez(folder / "params.npz", **params)  # pyright: ignore[reportArgumentType]


def check_resuming(name: str, folder: Path, cpu: bool) -> list[Row]:
    """Compares the parameters of killed and resumed runs with those of a whole one; this process itself
    touches no device, which the runs need whole."""
    whole = _finished(_started(name, folder / "whole", cpu), folder / "whole")
    rows = []
    for kill in (signal.SIGTERM, signal.SIGKILL):
        own = folder / kill.name
        process = _started(name, own, cpu)
        _wait_for_step(process, CHECKPOINT_STEPS + 1)
        process.send_signal(kill)
        process.communicate(timeout=_WAIT_S)
        found = _finished(_started(name, own, cpu), own)
        case = f"resume {name} after {kill.name}"
        pairs = [(found[each], value) for each, value in whole.items()]
        different = sum(not np.array_equal(*pair) for pair in pairs)
        most = max(float(np.abs(one - other).max()) for one, other in pairs)
        # Sums by atomic operations, as of an embedding's gradient, have no fixed order on GPUs.
        rows.append(row(case, "different_arrays", different))
        rows.append(row(case, "largest_difference", most))
    return rows


def _started(name: str, folder: Path, cpu: bool) -> "subprocess.Popen[str]":
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "benchmarks.train.steps", name, str(folder)]
    # What one run has compiled and tuned is what the others run.
    own = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    own |= {"JAX_PLATFORMS": "cpu"} if cpu else {}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **own})


def _wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    until = time.monotonic() + _WAIT_S
    assert process.stdout is not None
    for line in process.stdout:
        if f"step={step}," in line:
            return
        if time.monotonic() > until:
            break
    process.kill()
    raise JaxllmError(f"the run to be killed did not reach step {step}")


def _finished(process: "subprocess.Popen[str]", folder: Path) -> dict[str, np.ndarray]:
    """The parameters that a run leaves in its folder."""
    process.communicate(timeout=_WAIT_S)
    if process.returncode:
        raise JaxllmError(f"a training run ended with {process.returncode}")
    with np.load(folder / "params.npz") as stored:
        return dict(stored)


def serving_checks(tiny: bool) -> dict[str, Callable[[], list[Row]]]:
    """The checks by name; with `tiny` one bench, of the packaged model."""
    alone = ("--peer", "none", "--quick")
    if tiny:
        return {"serve-packaged": functools.partial(bench, ("engine", *alone))}
    # Prefill and decode of 1.1 billion random weights; levels of the packaged model.
    large = ("engine", "--shape", "1b", "--weights")
    return {
        "serve-bf16": functools.partial(bench, (*large, "bf16", *alone)),
        "serve-int8": functools.partial(bench, (*large, "int8", *alone)),
        "serve-levels": functools.partial(bench, ("elastic", "--only", "costs", "--quick")),
        "serve-integer-prefill": compare_integer_prefill,
    }


def bench(words: Sequence[str]) -> list[Row]:
    """The rows of ours that `jaxllm bench` prints."""
    printed = json.loads(_output_of("bench", *words, "--json"))
    return [
        row(
            f"{each['case']} ({each['system']})", each["metric"], each["value"], each.get("note"),
            unit=each["unit"],
        )
        for each in printed["rows"]
        if each["system"].startswith("jaxllm")
    ]  # fmt: skip


def compare_integer_prefill() -> list[Row]:
    """Answers after integer prefill on two processors: the GPU as the integer one, beside the CPU."""
    prompt = (
        "Once upon a time there was a small dog who lived beside a wide river. One day he met a fox. " * 4
    )
    words = ("generate", "--prefill", "int8", "--processors", "2", "--prompt", prompt, "--max-tokens", "20")
    texts = {device: _output_of(*words, "--integer-device", device) for device in ("cpu", "gpu")}
    same = float(texts["cpu"] == texts["gpu"])
    return [row("integer prefill with --integer-device gpu", "same_answer", same, texts["gpu"].strip())]


def _output_of(*words: str) -> str:
    # Benches start processes of their own: none of them may take the device's whole memory.
    shared = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    what = f"`jaxllm {' '.join(words)[:100]}`"
    return run_python(what, "-m", "jaxllm.cli.entry", *words, timeout=280, env=shared)


if __name__ == "__main__":
    train_here(sys.argv[1], Path(sys.argv[2]))
