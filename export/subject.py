"""Reads a bundle to export: weights as dense arrays, and levels with their adapters; rejects features that
no program supports."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import read_prefill
from jaxllm.bundle.levels import Recovery, read_recovery, require_level
from jaxllm.bundle.tiny_lm import TinyLm, read_tiny_lm
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.folder_format.parts import (
    INPUT_LEFT,
    INPUT_RIGHT,
    LEFT,
    RIGHT,
    AdapterInputs,
    Argument,
    ProgramLevel,
)
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.features import require_feature
from jaxllm.models.lora import (
    MAX_RANK,
    LoraConfig,
    adapted_parameters,
    adapter_digest,
    merge,
    parameters_of,
    target_of,
)
from jaxllm.models.parameters import param_specs
from jaxllm.quant import Weight, dequantize
from jaxllm.serving.weights.model_level import rank_of, read_adapter_of
from jaxllm.text.tokenizer import TokenizerFiles

# Weight formats that other runtimes support; narrower ones are stored in the order of the native kernels.
PORTABLE_WEIGHTS = ("f32", "bf16", "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters that programs accept.

    Attributes:
      given: folders in PEFT's layout, by name; may be empty, for future adapters.
      rank: maximum rank; 0 for that of the given ones.
    """

    given: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= MAX_RANK or not (self.rank or self.given):
            raise ConfigError(
                f"programs take adapters of a rank of 1 to {MAX_RANK}, got {self.rank}; name an adapter, or "
                "give --adapter-rank"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InputAdapters:
    """Description of the programs' input, and the arrays `[N]` of the whole model's adapters by name."""

    inputs: AdapterInputs
    arrays: Mapping[str, np.ndarray]


class Arrays(Mapping[str, np.ndarray]):
    """Arrays by name that are read whenever they are asked for, and so never in memory all at once.

    Attributes:
      shapes: shapes and dtypes by name.
    """

    def __init__(self, shapes: Mapping[str, Any], read: Callable[[str], np.ndarray]) -> None:
        self.shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> np.ndarray:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes by name; reads nothing of `Arrays`."""
    known = arrays.shapes if isinstance(arrays, Arrays) else arrays
    return {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in known.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to export.

    Attributes:
      model: fingerprint of the bundle, and of a merged adapter.
      arrays: arrays by name, each stored once: dense weights of the whole model `[*U, D]`, which a bundle's
        `Arrays` read one at a time, and factors of the levels' adapters.
      levels: the sub-models and the arrays of each; 100 is among them.
      calibration: calibration of integer prefill; None if the bundle has none.
      merged: whether an adapter was merged into the weights.
      tiny_lm: tiny LM that plans requests; None if the bundle has none, or none that chooses between these
        levels.
      adapters: adapters that programs accept as an input; None for none.
    """

    name: str
    model: str
    arrays: Mapping[str, np.ndarray]
    levels: Mapping[int, ProgramLevel]
    tokenizer: TokenizerFiles
    calibration: PrefillCalibration | None = None
    merged: bool = False
    tiny_lm: TinyLm | None = None
    adapters: InputAdapters | None = None

    @property
    def cfg(self) -> ModelConfig:
        """The whole model."""
        return self.levels[FULL_LEVEL].cfg

    def without_calibration(self) -> "Subject":
        """The same model as if its bundle were not calibrated."""
        return dataclasses.replace(self, calibration=None)

    def weights(self, level: int) -> Mapping[str, np.ndarray]:
        """The weight arguments of a level's programs by name, as views of the arrays."""
        weights, whole = self.levels[level].weights, shapes_of(self.arrays)
        shapes = {
            name: jax.ShapeDtypeStruct(each.shape, whole[each.stored].dtype) for name, each in weights.items()
        }
        return Arrays(shapes, lambda name: self.arrays[weights[name].stored][: weights[name].shape[0]])


def only_level(subject: Subject, level: int) -> Subject:
    """A level as a standalone model, with arrays cut to its units; the whole model unchanged."""
    if level == FULL_LEVEL:
        return dataclasses.replace(subject, levels={FULL_LEVEL: subject.levels[FULL_LEVEL]})
    entry, arrays = subject.levels[level], subject.weights(level)
    weights = {name: Argument(stored=name, shape=each.shape) for name, each in shapes_of(arrays).items()}
    return dataclasses.replace(
        subject,
        name=f"{subject.name} at level {level}",
        arrays=arrays,
        levels={FULL_LEVEL: ProgramLevel(cfg=entry.cfg, weights=weights)},
        calibration=None,
    )


def read_subject(
    path: Path,
    *,
    levels: Sequence[int] = (),
    adapter: Path | None = None,
    dtype: np.dtype | None = None,
    inputs: AdapterOptions | None = None,
) -> Subject:
    """Reads a bundle.

    Args:
      levels: levels to export besides the whole model, in percent.
      adapter: low-rank adapter of the model in PEFT's layout, to merge into the weights.
      dtype: dtype of the dense weights; None for float32.
      inputs: low-rank adapters that programs accept as an input; None for none.

    Raises:
      CheckpointError: the bundle or the adapter cannot be read.
      ConfigError: the bundle has a feature that portable programs do not support; the message names it.
    """
    if path.is_dir():
        raise CheckpointError(
            f"{path} is a folder; make a bundle of it with `jaxllm prepare` and export that"
        )
    dtype = np.dtype(np.float32) if dtype is None else dtype
    # Stays open: its weights are read later.
    bundle = Bundle.open(path)
    with without_native_kernels():
        require_feature(bundle.cfg, "programs")
        if bundle.layout.weights not in PORTABLE_WEIGHTS:
            raise ConfigError(
                f"{path} has {bundle.layout.weights} weights, a width that the native kernels alone read "
                f"(native-only width); prepare the model with --weights {' or '.join(PORTABLE_WEIGHTS)}"
            )
        cfgs = {
            FULL_LEVEL: bundle.cfg,
            **{each: require_level(bundle, each) for each in levels if each != FULL_LEVEL},
        }
        change, scaling, model = {}, 1.0, bundle.fingerprint
        if adapter is not None:
            lora, change = read_adapter_of(bundle, adapter)
            scaling = lora.scaling
            model = hashlib.sha256(f"{model} {adapter_digest(change, scaling)}".encode()).hexdigest()

        specs, sides = param_specs(bundle.cfg), dict[str, np.ndarray]()

        def read(name: str) -> np.ndarray:
            if name in sides:
                return sides[name]
            own = {side: array for side, array in change.items() if side.rpartition(".")[0] == name}
            found, at = np.empty(specs[name].shape, dtype), 0
            with without_native_kernels():
                for weight in bundle.weight_parts(name, whole=bool(own)):
                    part = np.asarray(_floats(merge({name: weight}, own, scaling)[name])).reshape(-1)
                    found.reshape(-1)[at : at + part.size] = part
                    at += part.size
            return found

        entries = {}
        for level, cfg in cfgs.items():
            own = param_specs(cfg if cfg.layer_units else bundle.cfg)
            entry = {name: Argument(stored=name, shape=spec.shape) for name, spec in own.items()}
            recovery = None if level == FULL_LEVEL else read_recovery(bundle, level)
            if recovery is not None:
                for name, side in _sides(recovery, dtype).items():
                    sides[f"level_{level}.{name}"] = side
                    entry[name] = Argument(stored=f"level_{level}.{name}", shape=side.shape)
            entries[level] = ProgramLevel(cfg=cfg, weights=entry)
        shapes = {name: jax.ShapeDtypeStruct(spec.shape, dtype) for name, spec in specs.items()}
        calibration, tiny = read_prefill(bundle), read_tiny_lm(bundle)
        # Copies, which outlive the open bundle.
        if calibration is not None:
            calibration = dataclasses.replace(
                calibration,
                steps=np.array(calibration.steps),
                channels={key: np.array(each) for key, each in calibration.channels.items()},
                rows={key: tuple(np.array(rows) for rows in each) for key, each in calibration.rows.items()},
            )
        if tiny is not None:
            copies = {name: np.array(each) for name, each in tiny.params.items()}
            tiny = dataclasses.replace(tiny, params=copies) if {*tiny.levels} & entries.keys() else None
        return Subject(
            name=bundle.layout.name,
            model=model,
            arrays=Arrays(shapes | shapes_of(sides), read),
            levels=entries,
            tokenizer=bundle.tokenizer_files(),
            calibration=calibration,
            merged=adapter is not None,
            tiny_lm=tiny,
            adapters=None if inputs is None else read_adapters(bundle, cfgs, inputs),
        )


@jax.jit
def _floats(weight: Weight) -> jax.Array:
    """A weight in float32, without intermediate results of its size."""
    return dequantize(weight, jnp.float32)


def _sides(recovery: Recovery, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns the factors of an adapter for programs: `[r, *U]`, scaled, and `[r, D]`; as float16, as in a
    bundle, if that is exact for the scaled numbers (programs convert them to float32)."""
    sides = {}
    for name in parameters_of(recovery.adapter):
        left, right = (recovery.adapter[f"{name}{side}"] for side in (LEFT, RIGHT))
        if right.ndim != 2:
            raise ConfigError(f"the adapter of {name} changes a stack of experts, which no program holds")
        turned = np.moveaxis(left.astype(np.float32), -1, 0) * np.float32(recovery.scaling)
        for side, wide in ((LEFT, np.ascontiguousarray(turned)), (RIGHT, right.astype(np.float32))):
            with np.errstate(over="ignore"):
                half = wide.astype(np.float16)
            sides[f"{name}{side}"] = half if np.array_equal(half, wide) else wide.astype(dtype)
    return sides


def read_adapters(bundle: Bundle, cfgs: Mapping[int, ModelConfig], options: AdapterOptions) -> InputAdapters:
    """Reads the adapters of a bundle's model, with its order of units.

    Args:
      cfgs: configs of the sub-models to export, by level.

    Raises:
      CheckpointError, ConfigError: an adapter cannot be read, is of another model, or has a higher rank; or
        the model supports none.
    """
    if bundle.cfg.encoder is not None or bundle.cfg.experts:
        raise ConfigError(
            f"programs of {bundle.cfg.model_type} take no adapters as an input; fold one in (--adapter)"
        )
    found = {name: read_adapter_of(bundle, folder) for name, folder in options.given.items()}
    targets = {target_of(each) for _, adapter in found.values() for each in parameters_of(adapter)}
    rank = options.rank or max(rank_of(adapter) for _, adapter in found.values())
    for name, (_, adapter) in found.items():
        if rank_of(adapter) > rank:
            raise ConfigError(
                f"the adapter {name} has rank {rank_of(adapter)}, and programs take up to {rank}; give a "
                "higher --adapter-rank"
            )
    # With only a rank, the parameters that adapters change by default.
    names = adapted_parameters(bundle.cfg, tuple(targets) or LoraConfig.targets)
    inputs = AdapterInputs(
        rank=rank,
        shapes={level: {name: param_specs(cfg)[name].shape for name in names} for level, cfg in cfgs.items()},
        names=tuple(found),
    )
    arrays = {}
    for name, (lora, adapter) in found.items():
        factors = {}
        for each in parameters_of(adapter):
            left = np.moveaxis(np.asarray(adapter[f"{each}{LEFT}"], np.float32), -1, 0)
            factors[f"{each}{INPUT_LEFT}"] = left * np.float32(lora.scaling)
            factors[f"{each}{INPUT_RIGHT}"] = np.asarray(adapter[f"{each}{RIGHT}"], np.float32)
        arrays[name] = inputs.joined(factors)
    return InputAdapters(inputs=inputs, arrays=arrays)
