"""Defines the settings that all kinds of training share, and reads recipes: frozen values from TOML files.

The packaged recipes are the files in `training/recipes`; any other is named by its path.
"""

import dataclasses
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

from jaxllm.errors import ConfigError
from jaxllm.files.input_files import read_text
from jaxllm.option_types import Share
from jaxllm.options import check_keys, check_options, option, required_options

Precision = Literal["float32", "bfloat16"]
_FROZEN: dict[Precision, Literal["f32", "bf16"]] = {"float32": "f32", "bfloat16": "bf16"}
_PACKAGED = Path(__file__).parent / "recipes"
_MAX_RECIPE_BYTES = 1 << 20


class Recipe:
    """Frozen dataclass that TOML files describe. Fields that are dataclasses are tables of the file."""

    folder: ClassVar[str]
    """Subfolder of `training/recipes` with the packaged recipes."""

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def names(cls) -> list[str]:
        """Names of the packaged recipes; a `.base.toml` is the base of others."""
        paths = (_PACKAGED / cls.folder).glob("*.toml")
        return sorted(path.stem for path in paths if "." not in path.stem)

    @classmethod
    def load(cls, name: str) -> Self:
        """Loads the recipe of that name; see `load_recipe`."""
        return load_recipe(name, cls)

    def to_json(self) -> dict[str, Any]:
        """The recipe as a plain dict for `from_json`."""
        return {name: _plain(value) for name, value in vars(self).items() if name in _fields(type(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads the dict of `to_json`, or a parsed TOML file.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        check_keys(cls, data, "recipe")
        kinds = _fields(cls)
        return cls(**{name: _read(name, kinds[name], value) for name, value in data.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings(Recipe):
    """Settings of the training loop for all jobs. The options' help describes them."""

    steps: int = option(help="Optimizer steps of the whole run.", low=1)
    batch: int = option(help="B, rows per step over all devices.", low=1)
    row_tokens: int = option(help="T, tokens of a row; longer documents are cut.", low=1)
    peak_learning_rate: float = option(
        help="Learning rate after `warmup_steps`, which then follows a cosine.", above=0, below=1
    )
    final_learning_rate_share: float = option(0.1, "Share of the peak, at the last step.", low=0, high=1)
    warmup_steps: int = option(100, "Steps of linear warm-up.", low=0)
    optimizer: Literal["adamw", "muon"] = option("adamw", "Optimizer of the matrices of layers.")
    muon_learning_rate_factor: float = option(
        1.0, "Muon's learning rate divided by AdamW's.", above=0, high=1000
    )
    weight_decay: float = option(0.1, "Decay of matrices; other parameters have none.", low=0)
    beta1: float = option(0.9, "AdamW's first decay.", low=0, below=1)
    beta2: float = option(0.95, "AdamW's second decay.", low=0, below=1)
    clip_norm: float = option(1.0, "Largest global norm of the gradient.", above=0)
    accumulate: int = option(
        1, "Split each step's batch into this many parts, whose gradients add up.", low=1
    )
    precision: Literal["float32", "bfloat16"] | None = option(
        None,
        "Type of activations and products; parameters, optimizer and losses are float32. Without it bfloat16 "
        "on accelerators and float32 on CPUs.",
    )
    remat: Literal["none", "dots", "full"] = option(
        "none",
        "Recompute activations in the backward pass rather than keep them: none, all but the results of "
        "products with weights, or all.",
    )
    seed: int = option(0, "Seed of initial parameters, order and dropout.", low=0)
    checkpoint_steps: int = option(100, "Steps between two checkpoints, each with its held-out loss.", low=1)
    evaluation_batches: int = option(
        256,
        "Measure held-out losses on at most N batches, spread over the held-out documents; 0 for all.",
        low=0,
        flags=("--eval-batches",),
    )
    log_steps: int = option(10, "Steps between two lines of metrics.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch % self.accumulate:
            raise ConfigError(
                f"batch ({self.batch}) must be a multiple of accumulate ({self.accumulate}), which divides it"
            )

    @property
    def computed_in(self) -> Precision:
        """The precision; if unset, that of this process's devices."""
        if self.precision is not None:
            return self.precision
        # Imported here: settings are read before anything waits for JAX.
        import jax

        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def frozen_in(self) -> Literal["f32", "bf16"]:
        """Default format of weights that are not trained."""
        return _FROZEN[self.computed_in]

    def on_accelerator(self) -> Self:
        """Returns the settings of accelerators, for steps that are only compiled for one."""
        return dataclasses.replace(self, precision=self.precision or "bfloat16")

    def require_window(self, window_tokens: int) -> None:
        """Raises ConfigError unless a row fits the model's window."""
        if self.row_tokens > window_tokens:
            raise ConfigError(
                f"row_tokens ({self.row_tokens}) must be at most the model's window ({window_tokens})"
            )

    def within(self, window_tokens: int) -> Self:
        """The settings with rows no longer than a model's window, and more of them in a step instead."""
        if self.row_tokens <= window_tokens:
            return self
        batch = self.batch * (self.row_tokens // window_tokens)
        return dataclasses.replace(self, row_tokens=window_tokens, batch=batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelSettings(Recipe):
    """Settings of levels, for `ElasticRecipe`. The options' help describes them."""

    anchor_share: float = option(
        0.2,
        "Layers to keep whole at every level, the most important ones.",
        low=0,
        high=1,
        click={"type": Share()},
    )
    order: Literal["importance", "magnitude", "random"] = option(
        "importance", "Order units by their importance to the loss; magnitude and random are baselines."
    )
    units: Literal["equal", "global", "layers"] = option(
        "equal",
        "Choose a level's units as an equal share of each layer, across layers by importance per "
        "parameter, or, as a baseline, as whole layers.",
    )
    depth: bool = option(
        False, "With --units global, a level may lack all kv groups, or all neurons, of a layer."
    )
    recovery: Literal["lora", "joint", "none"] = option(
        "lora",
        "Train an adapter for each level (as in the recipe `adapters`), all levels' weights jointly, or "
        "neither.",
    )
    whole_kl_nats: float = option(
        0.0,
        "With --recovery joint, maximum divergence of the whole model's next-token distribution from the "
        "original one, on held-out text; 0 sets no bound.",
        low=0,
        flags=("--whole-kl",),
        click={"metavar": "NATS"},
    )


Kind = TypeVar("Kind", bound=Recipe)


def load_recipe(name: str, *kinds: type[Kind]) -> Kind:
    """Loads the packaged recipe of that name, or the one in the TOML file at path `name` (ending in `.toml`).

    A recipe may name another file in its folder as its `base`; its keys are defaults.

    Args:
      *kinds: classes of recipes; the last one whose required keys the file has is used.

    Raises:
      ConfigError: there is no such recipe, or it is malformed.
    """
    try:
        if name.endswith(".toml"):
            settings = _settings(Path(name))
            fitting = [kind for kind in kinds if required_options(kind) <= settings.keys()]
            return [kinds[0], *fitting][-1].from_json(settings)
        for kind in kinds:
            if name in kind.names():
                return kind.from_json(_settings(_PACKAGED / kind.folder / f"{name}.toml"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {name}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"recipe {name}: {error}") from error
    names = ", ".join(known for kind in kinds for known in kind.names())
    raise ConfigError(
        f"there is no recipe {name!r}; the recipes are {names}, or give the path of a .toml file"
    )


def _settings(path: Path) -> dict[str, Any]:
    """The keys of a recipe's file, with those of its base."""
    settings = _read_toml(path)
    if "base" in settings:
        base = _read_toml(path.parent / str(settings.pop("base")))
        if "base" in base:
            raise ConfigError("the base of a recipe stands on another itself")
        settings = {**base, **settings}
    return settings


def _fields(cls: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(cls)}


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(read_text(path, _MAX_RECIPE_BYTES))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _read(name: str, kind: Any, value: Any) -> Any:
    """A field's value from JSON or TOML: dataclasses from tables, tuples from lists."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_read(name, get_args(kind)[0], each) for each in value)
    if not dataclasses.is_dataclass(kind) or isinstance(value, kind):  # pyright: ignore[reportArgumentType]
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"the recipe's {name} must be a TOML table, got {value!r:.80}")
    if hasattr(kind, "from_json"):
        return kind.from_json(value)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        lists = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
        return kind(**lists)  # pyright: ignore[reportCallIssue]
    except TypeError as error:
        raise ConfigError(f"malformed {name}: {error}") from error
