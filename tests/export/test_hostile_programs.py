"""Refuses folders of programs that are damaged and signed again, of other sizes, or with custom calls."""

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import BudgetExceeded, JaxllmError, ProgramError
from jaxllm.export.folder_format.manifest import MANIFEST, StoredFile
from jaxllm.export.programs.model import open_executor, open_program

pytest.importorskip("flatbuffers")

import jax.export


def inspect(program, bounds):
    bounds.require(jax.export.deserialize(bytearray(program)), "some")


FILE = "cache_32_decode.jaxexport"


@pytest.fixture(scope="module")
def executor(stablehlo):
    return open_executor(stablehlo)


@pytest.fixture(scope="module")
def decode(executor):
    """One of the programs, and its bounds."""
    (signature,) = [each for each in executor.manifest.signatures if each.file == FILE]
    return jax.export.deserialize(bytearray(executor._program(signature))), executor.bounds(signature)


def changed(program, change):
    """A program of the same arguments and results, in which `change` makes the first result of them."""

    def step(*arguments):
        out = dict(program.call(*arguments))
        name = min(out)
        return {**out, name: out[name] + 0 * change(out[name]).astype(out[name].dtype).sum()}

    arguments, _ = jax.tree.unflatten(
        program.in_tree, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in program.in_avals]
    )
    unchecked = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ("jaxllm_load_chunks", "xla_ffi_python_cpu_callback")
    ]
    step = jax.jit(step, keep_unused=True)
    return jax.export.export(step, platforms=("cpu",), disabled_checks=unchecked)(*arguments)


def kernel_of_addresses(cache):
    """The native kernel that reads wherever its arguments say."""
    kinds = [jax.ShapeDtypeStruct((1, 1, 16, 16), np.float32)] * 2
    address = jnp.array([[[0x41414140, 0x4141]]], jnp.uint32)
    room = jnp.zeros((1, 1, 16, 16), jnp.float32)
    kernel = jax.ffi.ffi_call("jaxllm_load_chunks", kinds)
    none = np.zeros(1, np.int32)
    return kernel(address, none, none[:0], room, room, tokens=np.int64(16))[0]


def host_function(cache):
    kind = jax.ShapeDtypeStruct(cache.shape, cache.dtype)
    return jax.ffi.ffi_call("xla_ffi_python_cpu_callback", kind)(cache, index=np.uint64(0x41414140))


def vast(cache):
    return jax.lax.iota(np.float32, 1 << 34).reshape(1 << 17, 1 << 17) + cache.sum()


def test_a_program_that_does_more_than_compute(decode):
    program, allowed = decode
    inspect(program.serialize(), allowed)
    for change, message in (
        (kernel_of_addresses, "it calls @jaxllm_load_chunks outside of itself"),
        (host_function, "it calls @xla_ffi_python_cpu_callback outside of itself"),
        (vast, "it allocates an array of 17179869184 numbers"),
    ):
        with pytest.raises(ProgramError, match=message):
            inspect(bytes(changed(program, change).serialize()), allowed)


SIZES_AT_RUN_TIME = """
func.func private @g(%x: tensor<?xf32>) -> tensor<?xf32> {
  func.return %x : tensor<?xf32>
}
"""


def test_sizes_that_are_known_at_run_time_only(decode):
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    program, allowed = decode
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, program.mlir_module_serialized)
        for each in ir.Module.parse(SIZES_AT_RUN_TIME).body:
            module.body.append(each.operation.clone())
        version = stablehlo.get_current_version()
        raw = stablehlo.serialize_portable_artifact(module, version)
    evil = dataclasses.replace(program, mlir_module_serialized=raw)
    with pytest.raises(ProgramError, match=r"some: it allocates an array of \? numbers"):
        inspect(bytes(evil.serialize()), allowed)


def test_a_program_of_other_arguments(decode, executor):
    program, allowed = decode
    with pytest.raises(ProgramError, match="it takes 27 arrays, the manifest says 25, or others"):
        inspect(program.serialize(), dataclasses.replace(allowed, inputs=allowed.inputs[:-1]))
    renamed = {f"{name}!": each for name, each in allowed.outputs.items()}
    with pytest.raises(ProgramError, match="it returns 5 arrays"):
        inspect(program.serialize(), dataclasses.replace(allowed, outputs=renamed))
    # A program of caches of another length has other arguments, too.
    (longer,) = [each for each in executor.manifest.signatures if each.file == "decode.jaxexport"]
    with pytest.raises(ProgramError, match="it takes"):
        inspect(program.serialize(), executor.bounds(longer))


@pytest.fixture
def copy(stablehlo, tmp_path):
    return Path(shutil.copytree(stablehlo, tmp_path / "copy"))


def sign(folder, *names):
    """Has the manifest say of files what they are."""
    data = json.loads((folder / MANIFEST).read_text())
    data["files"] |= {name: dataclasses.asdict(StoredFile.of(folder / name)) for name in names}
    (folder / MANIFEST).write_text(json.dumps(data))


def test_a_harmful_program_is_not_compiled(copy, decode, compiles):
    program, _ = decode
    for raw, message in (
        (changed(program, kernel_of_addresses).serialize(), "it calls @jaxllm_load_chunks"),
        (b"some" * 100, r"cannot be compiled .*; export the model again"),
    ):
        (copy / FILE).write_bytes(raw)
        sign(copy, FILE)
        executor = open_executor(copy)
        (signature,) = [each for each in executor.manifest.signatures if each.file == FILE]
        with compiles() as count, pytest.raises(ProgramError, match=rf"{FILE}: {message}"):
            executor.prepare([signature])
        assert count() == 0


# Whatever an interrupted copy or a fuzzer makes of a manifest: errors of ours, soon.
JUNK = (
    {}, [], "", "x", [0], 1e308, 10**400, 1 << 62, 1 << 24, -1, 0, True, None, 3, 0.5, "../x", "a\0b",
    float("nan"),
)  # fmt: skip


def places(node, at=()):
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*at, key)
        yield from places(child, (*at, key))


def refusal(folder):
    """What is said of a folder, if it is refused."""
    try:
        open_executor(folder)
    except JaxllmError as error:
        return str(error)
    return ""


def test_manifests_that_say_anything_at_all(copy):
    draw, text = random.Random(5), (copy / MANIFEST).read_text()
    where = list(places(json.loads(text)))
    # Few places are of the kind that says how large something is, and these do most harm.
    chosen = [*(each for each in where if len(each) < 4), *draw.sample(where, 150)]
    for at in chosen:
        data = json.loads(text)
        node = data
        for key in at[:-1]:
            node = node[key]
        node[at[-1]] = draw.choice(JUNK)
        (copy / MANIFEST).write_text(json.dumps(data))
        assert "\n" not in refusal(copy)


def test_files_that_are_none_and_caches_larger_than_this_machine(copy, monkeypatch):
    for name in ("weights.safetensors", "tokenizer.json", MANIFEST):
        path = copy / name
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(ProgramError, match=r"missing or truncated|not a folder of programs"):
            open_executor(copy)
        path.unlink()
        path.write_bytes(kept)
    open_executor(copy)
    monkeypatch.setattr("jaxllm.export.programs.model.memory_bytes", lambda: 1000)
    with pytest.raises(BudgetExceeded, match=r"caches of 64 tokens take .*--context"):
        open_program(copy)


def test_damaged_weights_and_programs_that_are_signed_again(copy):
    """The header of the weights and the programs, a few bytes at a time."""
    draw = random.Random(7)
    weights = copy / "weights.safetensors"
    kept = weights.read_bytes()
    for _ in range(60):
        raw = bytearray(kept)
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(2000)] = draw.randrange(256)
        weights.write_bytes(raw)
        sign(copy, weights.name)
        assert "\n" not in refusal(copy)
