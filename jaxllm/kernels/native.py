"""Loads the native CPU kernels, and calls their products from compiled steps (attention:
`native_attention.py`).

The library is built with the package if there is a C++ compiler (`native/`, `setup.py`). A process has one
library and one pool of threads; its choice of instruction set applies to all of its steps. Without the
library, on other devices and in exported programs XLA computes the same functions (`linear.py`, `layers.py`).

Activations are quantized on the fly to 8 bits, with one scale per token and 256 inputs, or with a given
static `step` in [1e-30, 1e30], at which values beyond ±127 steps are clipped. A token whose activations hold
NaN or
infinity gives NaN; magnitudes under 1e-30 count as zero.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import Activation
from jaxllm.errors import ConfigError
from jaxllm.kernels.used_units import UsedUnits
from jaxllm.quant import Adapted, AdaptedFromBuffer, BlockedArray

Adaptable = BlockedArray | Adapted | AdaptedFromBuffer
# Environment variable: "xla" for no native kernels, or an instruction set from `Kernels.choices`.
CHOICE_VARIABLE = "JAXLLM_KERNELS"
THREADS_VARIABLE = "JAXLLM_THREADS"
_MOST_THREADS = 256
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu")
_without_native = contextvars.ContextVar("without_native", default=False)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels of this process's CPU.

    Attributes:
      name: the instruction set of the native kernels, or "xla".
      reason: why this one was chosen.
      choices: instruction sets that this processor runs, fastest first; empty without the library.
      missing: whether the native library could not be loaded although it was not switched off.
    """

    name: str
    reason: str
    choices: tuple[str, ...] = ()
    missing: bool = False

    @property
    def native(self) -> bool:
        """Whether the native library is in use."""
        return self.name != "xla"


@contextlib.contextmanager
def without_native_kernels() -> Iterator[None]:
    """Within this context, steps are traced and weights are placed for XLA's kernels, for other
    machines."""
    token = _without_native.set(True)
    try:
        yield
    finally:
        _without_native.reset(token)


def kernels() -> Kernels:
    """The kernels in use: those of this process, or XLA's within `without_native_kernels`.

    Raises:
      ConfigError: see `process_kernels`.
    """
    return Kernels("xla", "the steps are for other machines") if _without_native.get() else process_kernels()


@functools.cache
def process_kernels() -> Kernels:
    """Loads and registers the native library, once.

    Raises:
      ConfigError: the environment asks for kernels that do not run here, or for an invalid number of threads.
    """
    choice = os.environ.get(CHOICE_VARIABLE, "")
    if choice == "xla":
        return Kernels("xla", f"{CHOICE_VARIABLE}=xla")
    try:
        library = _library()
        for name, target in library.targets().items():
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    except Exception as error:
        # Any error: the library is not built, built for another system, or needs a newer XLA.
        reason = "they were not built" if isinstance(error, ModuleNotFoundError) else f"{error}"
        if choice:
            raise ConfigError(
                f"{CHOICE_VARIABLE}={choice}: there are no native kernels ({reason})"
            ) from error
        return Kernels("xla", reason, missing=True)
    choices = library.backends()
    try:
        library.use_backend(choice)
    except ValueError as error:
        raise ConfigError(f"{CHOICE_VARIABLE}: {error}; kernels here: {', '.join(choices)}") from error
    library.set_threads(_threads_wanted())
    reason = f"{CHOICE_VARIABLE}={choice}" if choice else "the fastest that this processor runs"
    return Kernels(library.backend(), reason, choices)


def set_threads(count: int) -> None:
    """Sets how many threads share a kernel's work, for the whole process.

    Raises:
      ConfigError: not a number of threads.
    """
    _check_threads("threads", count)
    if kernels().native:
        _library().set_threads(count)


def threads() -> int:
    """Threads that share a kernel's work."""
    return _library().threads() if kernels().native else 1


def busy_ns() -> int:
    """Nanoseconds that this process has spent in native kernels (0 without them)."""
    return _library().busy_ns() if kernels().native else 0


def read_all(data: np.ndarray) -> None:
    """Reads an array once with all threads, as fast as the kernels read weights; needs the library."""
    _library().read_all(data)


def to_units(
    x: jax.Array,
    weights: Sequence[Adaptable],
    *,
    norm_scale: jax.Array | None = None,
    norm_eps: float = 0.0,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    step: jax.Array | None = None,
) -> list[jax.Array]:
    """Products of `x` `[M, D]` float32, after an RMS norm if given, with weights `[*U, D]` of one format,
    contracted along their last axis: `[M, prod(U)]` float32 each. Outputs of unused units are undefined. For
    `rowwise` see `linear.py`."""
    outputs = [int(np.prod(weight.shape[:-1])) for weight in weights]
    call = jax.ffi.ffi_call(
        target("to_units"),
        [jax.ShapeDtypeStruct((x.shape[0], count), jnp.float32) for count in outputs],
    )
    counts, indices = unit_counts(used)
    parts = [part for weight in weights for part in parts_of(weight)]
    attributes = {
        **format_of(weights[0]),
        **indices,
        **adapter_offsets(*weights),
        "eps": np.float32(norm_eps),
    }
    attributes["widen"] = not rowwise
    # Weights that are used in part have the same number of units; their rows per unit differ.
    units = np.int64(1 if used is None else weights[0].shape[0])
    return list(call(x, optional(norm_scale), counts, steps_operand(step), *parts, **attributes, units=units))


def from_units(
    h: jax.Array,
    weight: Adaptable,
    *,
    residual: jax.Array | None = None,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    step: jax.Array | None = None,
) -> jax.Array:
    """Product of `h` `[M, prod(U)]` float32 with a weight `[*U, D]`, contracted over its used units, plus
    `residual` `[M, D]` if given: `[M, D]` float32."""
    call = jax.ffi.ffi_call(
        target("from_units"), jax.ShapeDtypeStruct((h.shape[0], weight.shape[-1]), jnp.float32)
    )
    stacked = weight.ndim == 3
    counts, indices = unit_counts(used)
    attributes = {
        **format_of(weight),
        **indices,
        **adapter_offsets(weight),
        "stacked": stacked,
        "widen": not rowwise,
    }
    segments = np.int64(weight.shape[0] if stacked else 1)
    operands = (h, *parts_of(weight), optional(residual), counts, steps_operand(step))
    return call(*operands, **attributes, segments=segments)


def feed_forward(
    x: jax.Array,
    gate: Adaptable | None,
    up: Adaptable,
    down: Adaptable,
    *,
    activation: Activation,
    norm_scale: jax.Array | None,
    norm_eps: float,
    residual: bool,
    used: UsedUnits | None = None,
    rowwise: bool = False,
    steps: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """`down(activation(gate(x)) · up(x))` of `x` `[M, D]` float32 over the used units of weights `[F, D]` of
    one format. x is RMS-normalized first if a norm is given, and added to the result if `residual`. `steps`
    are those of x and of the input of `down`."""
    call = jax.ffi.ffi_call(target("feed_forward"), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    nothing = jnp.zeros((0,), jnp.float32)
    gate_parts = (nothing,) * 4 if gate is None else parts_of(gate)
    counts, indices = unit_counts(used)
    return call(
        x,
        optional(norm_scale),
        counts,
        steps_operand(*(steps or ())),
        *gate_parts,
        *parts_of(up),
        *parts_of(down),
        **format_of(up),
        **indices,
        **adapter_offsets(gate, up, down),
        units=np.int64(up.shape[0]),
        activation=np.int64(ACTIVATIONS.index(activation)),
        residual=residual,
        eps=np.float32(norm_eps),
        widen=not rowwise,
    )


def add_normed(residual: jax.Array, x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`residual` and the RMS norm of rows `x`, both `[M, D]` float32: `[M, D]`."""
    call = jax.ffi.ffi_call(target("add_normed"), jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, scale, residual, eps=np.float32(eps))


def integer_product(x: jax.Array, weight: BlockedArray) -> jax.Array:
    """`x` `[M, D]` int8 in [-127, 127] times the levels of a weight `[R, D]` of 8 bits, without scales: `[M,
    R]` int32, exact. -128 counts as -127."""
    call = jax.ffi.ffi_call(
        target("integer_product"), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.int32)
    )
    return call(x, weight.data)


def unit_rows(weight: BlockedArray, index: jax.Array) -> jax.Array:
    """Rows of a weight `[R, C]`, contracted along its last axis, at `index` (any shape, int32; out of range
    counts as the last): `[*index.shape, C]` float32."""
    result = jax.ShapeDtypeStruct((*index.shape, weight.shape[-1]), jnp.float32)
    call = jax.ffi.ffi_call(target("unit_rows"), result)
    return call(index, weight.data, weight.scale, **format_of(weight), outputs=np.int64(weight.shape[0]))


def largest(x: jax.Array) -> jax.Array:
    """The index of each row's largest value or NaN, the first of equals, for `x` `[M, V]` float32: `[M]`
    int32."""
    return jax.ffi.ffi_call(target("largest"), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))(x)


def target(name: str) -> str:
    """XLA's name of a kernel, after registering the kernels."""
    if not kernels().native:
        raise ConfigError(f"there are no native kernels in this process ({kernels().reason})")
    return f"jaxllm_{name}"


def format_of(weight: Adaptable) -> dict[str, np.int64]:
    """Attributes of an FFI call that describe a weight's format."""
    stored = _stored(weight)
    return {"bits": np.int64(stored.bits), "group": np.int64(stored.group)}


def adapter_offsets(*weights: Adaptable | None) -> dict[str, np.ndarray]:
    """Per weight, where the factors of its adapter begin in their buffers, and the rank."""

    def offsets(weight: Adaptable | None) -> tuple[int, int, int]:
        if isinstance(weight, AdaptedFromBuffer):
            return weight.at, weight.right_at, weight.rank
        return 0, 0, weight.left.shape[0] if isinstance(weight, Adapted) else 0

    return {"adapters": np.array([offsets(weight) for weight in weights], np.int64).reshape(-1)}


def parts_of(weight: Adaptable) -> tuple[jax.Array, ...]:
    """Operands of a weight: data, scales, and the buffers of its adapter's factors, empty without one."""
    stored, nothing = _stored(weight), jnp.zeros((0,), jnp.float32)
    sides = (nothing, nothing)
    if isinstance(weight, AdaptedFromBuffer):
        sides = (weight.buffer, weight.buffer)
    elif isinstance(weight, Adapted):
        sides = (weight.left.astype(jnp.float32), weight.right.astype(jnp.float32))
    return stored.data, stored.scale, *sides


def _stored(weight: Adaptable) -> BlockedArray:
    """A weight without its adapter."""
    stored = weight if isinstance(weight, BlockedArray) else weight.base
    assert isinstance(stored, BlockedArray)
    return stored


def unit_counts(used: UsedUnits | None) -> tuple[jax.Array, dict[str, np.int64]]:
    """The operand with the counts of used units and ranks, empty for all, and their indices in it as
    attributes."""
    if used is None:
        return jnp.zeros((0,), jnp.int32), {"units_at": np.int64(-1), "rank_at": np.int64(-1)}
    units_at, rank_at = used.indices
    return used.counts, {"units_at": np.int64(units_at), "rank_at": np.int64(rank_at)}


def steps_operand(*steps: jax.Array | None) -> jax.Array:
    """Static steps as an operand, empty for none."""
    given = [each for each in steps if each is not None]
    return (
        jnp.stack([jnp.asarray(each, jnp.float32) for each in given])
        if given
        else jnp.zeros((0,), jnp.float32)
    )


def optional(value: jax.Array | None) -> jax.Array:
    """An optional operand, empty for none."""
    return jnp.zeros((0,), jnp.float32) if value is None else value


def _threads_wanted() -> int:
    asked = os.environ.get(THREADS_VARIABLE)
    if asked is not None:
        return _check_threads(THREADS_VARIABLE, int(asked) if asked.isdecimal() else asked)
    affinity = getattr(os, "sched_getaffinity", None)
    return min(_MOST_THREADS, len(affinity(0)) if affinity else (os.cpu_count() or 1))


def _check_threads(name: str, count: Any) -> int:
    if not isinstance(count, int) or not 1 <= count <= _MOST_THREADS:
        raise ConfigError(f"{name} must be a whole number in [1, {_MOST_THREADS}], got {count!r:.80}")
    return count


def _library() -> Any:
    # Not `from jaxllm.kernels import ...`: this form raises different errors for a missing and for a broken
    # library.
    import jaxllm.kernels._native as library  # pyright: ignore[reportMissingImports]: may not be built

    return library
