"""Compares the programs of a new folder, as their runtime runs them, with the steps they were made of."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from ml_dtypes import bfloat16

from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ProgramError
from jaxllm.export.by_layer import run_by_layer
from jaxllm.export.folder_format.manifest import TINY_WEIGHTS, WEIGHTS, Manifest, Precision
from jaxllm.export.folder_format.signature import (
    CHUNK_TOKENS,
    CHUNKS,
    CODED_KINDS,
    KEYS,
    MASK,
    POSITIONS,
    SOURCE_TOKENS,
    STOP_IDS,
    VALUES,
    Interface,
    Signature,
    controls,
)
from jaxllm.export.folder_format.weights import read_weights
from jaxllm.export.programs.executor import Executor
from jaxllm.export.programs.golden import with_golden
from jaxllm.export.programs.litert_library import Library, OpenPrograms, captured_messages
from jaxllm.export.programs.model import ProgramModel
from jaxllm.export.signatures import MASKED_KINDS, ExportPlan, step_weights, subject_step
from jaxllm.export.steps.exported import ParamsOf, Step, with_adapters
from jaxllm.export.subject import Arrays, Subject
from jaxllm.kernels.native import without_native_kernels
from jaxllm.sampling_state import NO_TOKEN, Sampling, sampler_state
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.host.machine import usable_cores
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

# Allowed size of the difference of a program and its step, relative to what the step computes: of two
# compilations, and of quantized weights; programs of other weights differ by 1.4.
_TOLERANCES = {"f32": 1e-4, "bf16": 5e-2, "int8": 0.3, "int4": 0.3, "w8a8": 1.0}
# And of caches.
_CACHE_TOLERANCES = {"f32": 0.0, "f16": 5e-3, "int8": 5e-2}
_LOOSE = 0.1


# Runs the program of a signature over caches and inputs by name; returns its caches and outputs.
Run = Callable[[Signature, dict[str, np.ndarray], dict[str, np.ndarray]], Mapping[str, Any]]


def verify(
    run: Run,
    signatures: Sequence[Signature],
    subject: Subject,
    plan: ExportPlan,
    precision: Precision,
    progress: Progress | None = None,
    params_of: ParamsOf | None = None,
) -> None:
    """Runs every program once, and its step of the subject's weights on the same inputs, with the weights of
    one layer in memory at a time.

    Args:
      run: runs programs.
      signatures: theirs.
      subject: the exported model, in float32 or bfloat16, with weights as the programs have them.
      plan: the resolved plan of the export.
      precision: precision of the programs.
      progress: callback for ("verify", programs done, number of programs).
      params_of: makes the parameters of steps without loops, one layer's at a time; None for plain ones.

    Raises:
      ProgramError: the results differ, or a program does not run.
    """
    dtype, tolerance = np.dtype(bfloat16 if precision == "bf16" else np.float32), _TOLERANCES[precision]
    tolerance = max(tolerance, _CACHE_TOLERANCES[plan.cache])
    for done, signature in enumerate(signatures):
        vocab_size = subject.levels[signature.level].cfg.vocab_size
        if signature.kind == "tiny_lm":
            assert subject.tiny_lm is not None
            vocab_size = subject.tiny_lm.cfg.encoder.vocab_size
        room = plan.room(signature)
        caches, inputs = example_arguments(
            signature, plan.interface(signature, subject, dtype), vocab_size, room
        )
        if (tolerance > _LOOSE or plan.cache == "int8") and POSITIONS in inputs:
            # Random keys and values lie beyond those of texts, and each layer multiplies what is lost there.
            caches = {name: np.zeros_like(each) for name, each in caches.items()}
        if plan.masked and signature.kind in MASKED_KINDS:
            inputs[MASK] = (np.arange(room) <= inputs[POSITIONS][:, None])[None, None]
        # Of random tokens each layer multiplies what the one before lost.
        lossy = precision == "w8a8" or (tolerance > _LOOSE and plan.cache == "int8")
        first = {KEYS.format(0), VALUES.format(0)} if lossy else set[str]()
        loops, own = params_of is None, params_of or with_adapters
        step = functools.partial(
            _only, first, subject_step(signature, subject, dtype, loops=loops, params_of=own)
        )
        with without_native_kernels():
            wanted = run_by_layer(step, step_weights(signature, subject), caches, inputs)
        found = run(signature, caches, inputs)
        for output, each in wanted.items():
            this, that = (np.asarray(array, np.float32) for array in (found[output], each))
            change = that - np.asarray(caches[output], np.float32) if output in caches else that
            difference = _size(this - that) / max(_size(change), 1e-6)
            # Rounding decides between tokens of quantized weights.
            compared = tolerance < _LOOSE or each.dtype == np.float32 or output in caches
            if compared and not difference <= tolerance:
                raise ProgramError(
                    f"the program {signature.name} differs from its step by {difference:.2%} in {output}; "
                    "report this model and the versions of jax and of what compiled it"
                )
        if progress is not None:
            progress("verify", done + 1, len(signatures))


def _only(names: set[str], step: Step, weights: Any, caches: Any, inputs: Any) -> dict[str, jax.Array]:
    """The results of a step that have these names, if it has them all and there are any."""
    found = step(weights, caches, inputs)
    return {name: found[name] for name in names} if names and names <= found.keys() else found


def run_of_folder(folder: Path, subject: Subject) -> Run:
    """Runs StableHLO programs from their files, with the weights from theirs."""
    stored = read_weights(folder / WEIGHTS, model=subject.model)

    def run(signature: Signature, caches: Any, inputs: Any) -> Mapping[str, Any]:
        weights: Mapping[str, Any] = {}
        if signature.kind == "tiny_lm":
            weights = read_weights(folder / TINY_WEIGHTS, model=subject.model)
        elif signature.kind not in CODED_KINDS:
            weights = subject.levels[signature.level].views(stored)
        program = jax.export.deserialize(bytearray((folder / signature.file).read_bytes()))
        return jax.jit(program.call)(weights, caches, inputs)

    return run


@contextlib.contextmanager
def run_of_model(path: Path) -> Iterator[Run]:
    """Runs the signatures of a `.tflite` model by LiteRT, over weights packed in a file of its folder.

    Raises:
      ProgramError: LiteRT refuses the model.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as place, path.open("rb") as file, captured_messages():
        packed = f"{place}/packed"
        opened = OpenPrograms(Library("cpu"), file.fileno(), None, threads=usable_cores(), packed=packed)

        def run(signature: Signature, caches: Any, inputs: Any) -> Mapping[str, Any]:
            name, arrays = signature.name, {**caches, **inputs}
            given = {each: opened.buffer(name, each) for each in opened.arrays(name)}
            for each, buffer in given.items():
                buffer.write(np.asarray(arrays[each]))
            results = {
                each: opened.buffer(name, each, output=True) for each in opened.arrays(name, output=True)
            }
            opened.run(name, given, results)
            return Arrays(results, lambda name: results[name].read())

        yield run


def write_golden(folder: Path, executor: Executor, subject: Subject) -> Manifest:
    """Writes golden answers into the manifest of a new folder, whose programs `executor` runs."""
    model = ProgramModel(executor, Tokenizer(subject.tokenizer))
    manifest = with_golden(executor.manifest, Engine(model, FULL_LEVEL, None))
    manifest.write(folder)
    return manifest


def example_arguments(
    signature: Signature, interface: Interface, vocab_size: int, cache_tokens: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns random caches and inputs of a program: a chunk whose last token is padding, a tree of two
    branches, a greedy block of full length, a source whose last token is padding, chunks in reverse order.

    Greedy, because a sum that two compilers round differently may decide between sampled tokens.
    """
    count, draw = signature.tokens, np.random.default_rng(signature.tokens + signature.bits)

    def drawn(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if dtype.kind in "iub":
            return draw.integers(0, {"i": vocab_size, "u": 99, "b": 2}[dtype.kind], shape).astype(dtype)
        return (0.1 * draw.standard_normal(shape)).astype(dtype)

    caches = {name: 10 * drawn(*each) for name, each in interface.caches.items()}
    inputs = {name: drawn(*each) for name, each in interface.inputs.items()}
    if signature.kind == "tiny_lm":
        inputs[MASK] = np.arange(count)[None] < count - 1
    if signature.kind == "encode":
        inputs[SOURCE_TOKENS][:] = max(1, count - 1)
    elif SOURCE_TOKENS in inputs:
        inputs[SOURCE_TOKENS][:] = max(1, interface.inputs["source_k_0"][0][2] - 1)
    if CHUNKS in inputs:
        inputs[CHUNKS] = np.arange(count // CHUNK_TOKENS, dtype=np.int32)[::-1].copy()
    if POSITIONS not in inputs:
        return caches, inputs
    start = min(3, cache_tokens - count)
    positions = np.arange(start, start + len(inputs[POSITIONS]), dtype=np.int32)
    inputs[POSITIONS] = positions
    if signature.kind == "block":
        state = sampler_state(Sampling(), [], vocab_size, 0)
        inputs |= controls(state, np.full(STOP_IDS, NO_TOKEN, np.int32), count)
    elif signature.kind == "verify":
        inputs[MASK] = np.tril(np.ones((count, count), np.bool_))
        # The last node is a second child of the root.
        inputs[MASK][-1, 1:-1] = False
        positions[-1] = start + 1
    elif count > 1:
        positions[-1] = 0
    return caches, inputs


def _size(array: np.ndarray) -> float:
    """The root of the mean square of an array."""
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
