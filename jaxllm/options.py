"""Declares options once, as fields of a frozen dataclass with help, bounds and choices.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class LoopSettings:
        steps: int = option(help="Optimizer steps.", low=1)
        optimizer: Literal["adamw", "muon"] = option("adamw", "Optimizer of matrices.")

        def __post_init__(self) -> None:
            check_options(self)

The annotation defines the allowed values: int, float, bool, str, Path, a Literal, a tuple of one of these,
or one of these and None. Checks (`check_options`), options of command lines (`click_option`), keys of TOML
files (`check_keys`) and tables of the documentation come from the same declaration. This module imports no
JAX.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from jaxllm.layer_configs import require, require_float, require_int

_DECLARATION = "option"
Command = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Help and bounds of one option; None is no bound.

    Attributes:
      help: one or more sentences, for command lines and tables.
      low: minimum value.
      high: maximum value.
      above: exclusive lower bound.
      below: exclusive upper bound.
      entries: minimum number of entries of a tuple.
      ascending: whether the entries of a tuple ascend.
      flags: names on the command line; `--name` by default.
      click: further arguments of `click.option`, such as `type` and `metavar`.
    """

    help: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    entries: int = 0
    ascending: bool = False
    flags: tuple[str, ...] = ()
    click: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_PLAIN = Declaration()


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002
    **declared: Any,
) -> Any:
    """A field of a dataclass, with the attributes of its `Declaration`. Without a default the field is
    required; a callable default is a factory."""
    metadata = {_DECLARATION: Declaration(help, **declared)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declaration(cls: type, name: str) -> tuple[Any, Declaration]:
    """Type (without None) and declaration of a class's option."""
    field = cls.__dataclass_fields__[name]
    return without_none(field.type)[0], field.metadata[_DECLARATION]


def check_options(config: Any) -> None:
    """Checks the fields of a config by annotations and declarations; makes tuples of lists, and paths of
    texts. Fields of other types are left to the config.

    Raises:
      ConfigError: a value has another type, is out of bounds or is none of the choices.
    """
    for field in dataclasses.fields(config):
        declared = field.metadata.get(_DECLARATION, _PLAIN)
        value = _checked(field.name, field.type, declared, getattr(config, field.name))
        object.__setattr__(config, field.name, value)


def check_keys(cls: type, data: Mapping[str, Any], what: str) -> None:
    """Checks that the keys of data are fields of a dataclass, including all without a default.

    Args:
      data: values from a file, by key.
      what: name of what the file describes, for messages.

    Raises:
      ConfigError: a key is unknown or missing.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown, known = ", ".join(sorted(set(data) - set(fields))), ", ".join(sorted(fields))
    require(not unknown, f"unknown {what} key {unknown}; the keys are {known}")
    missing = ", ".join(sorted(required_options(cls) - set(data)))
    require(not missing, f"the {what} lacks {missing}")


def required_options(cls: type) -> set[str]:
    """Names of a dataclass's fields without a default."""
    fields, none = dataclasses.fields(cls), dataclasses.MISSING
    return {each.name for each in fields if each.default is none and each.default_factory is none}


def click_option(
    cls: type, name: str, *flags: str, default: str | None = None, **more: Any
) -> Callable[[Command], Command]:
    """A command-line option; its value is None if it is not given.

    Args:
      cls: dataclass that declares it.
      name: name of the field, and of the command's parameter.
      *flags: names on the command line, if others than declared.
      default: text for the help instead of the field's default.
      **more: overriding arguments of `click.option`, such as `type` and `metavar`.
    """
    # Imported here: a process that only checks options has no command line.
    import click

    kind, declared = declaration(cls, name)
    if default is None:
        value = cls.__dataclass_fields__[name].default
        default = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    # A help text may name the default itself.
    text = declared.help if "[default: " in declared.help else f"{declared.help}  [default: {default}]"
    more = {"help": text, **declared.click, **more}
    if get_origin(kind) is tuple:
        more.setdefault("multiple", True)
        kind = get_args(kind)[0]
    more.setdefault("type", _click_type(kind, declared))
    return click.option(*(flags or declared.flags or (f"--{name.replace('_', '-')}",)), name, **more)


def click_options(cls: type, *names: str, **how: Any) -> Callable[[Command], Command]:
    """The command-line options of several fields, in the order of the help text; see `click_option`."""
    return combined(*(click_option(cls, name, **how) for name in names))


def combined(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combines several options into one decorator, in the order of the help text."""

    def decorate(command: Command) -> Command:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def _click_type(kind: Any, declared: Declaration) -> Any:
    import click

    if get_origin(kind) is Literal:
        return click.Choice([str(each) for each in get_args(kind) if each])
    if kind in (int, float):
        low = declared.low if declared.above is None else declared.above
        high = declared.high if declared.below is None else declared.below
        bounds = {"min_open": declared.above is not None, "max_open": declared.below is not None}
        if kind is int:
            return click.IntRange(low, high)  # pyright: ignore[reportArgumentType]: whole in declarations
        return click.FloatRange(low, high, **bounds)
    return click.Path(path_type=kind) if _is_path(kind) else kind


def _is_path(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__fspath__")


def without_none(kind: Any) -> tuple[Any, bool]:
    """A type without None, and whether it allows None."""
    if get_origin(kind) in (Union, types.UnionType):
        rest = [each for each in get_args(kind) if each is not types.NoneType]
        if len(rest) == 1:
            return rest[0], True
    return kind, False


def _checked(name: str, kind: Any, declared: Declaration, value: Any) -> Any:
    kind, optional = without_none(kind)
    if optional and value is None:
        return None
    origin = get_origin(kind)
    if origin is Literal:
        choices = get_args(kind)
        listed = ", ".join(str(each) for each in choices if each != "")
        require(value in choices, f"{name} must be one of {listed}, got {value!r:.80}")
    elif origin is tuple and Ellipsis in get_args(kind):
        require(isinstance(value, list | tuple), f"{name} must be a list, got {value!r:.80}")
        value = tuple(_checked(f"each of {name}", get_args(kind)[0], declared, each) for each in value)
        enough = len(value) >= declared.entries
        require(enough, f"{name} must have {declared.entries} or more entries, got {value}")
        ascends = not declared.ascending or list(value) == sorted(set(value))
        require(ascends, f"{name} must be ascending, got {value!r:.80}")
    elif kind is int:
        require_int(name, value, declared.low, declared.high)
    elif kind is float:
        require_float(
            name, value, least=declared.low, above=declared.above, most=declared.high, below=declared.below
        )
    elif kind is bool:
        require(isinstance(value, bool), f"{name} must be true or false, got {value!r:.80}")
    elif kind is str:
        require(isinstance(value, str), f"{name} must be text, got {value!r:.80}")
    elif _is_path(kind):
        valid = isinstance(value, str | kind) and str(value) != ""
        require(valid, f"{name} must be a path, got {value!r:.80}")
        value = kind(value)
    return value
