"""Declares the options that training commands share; importing it imports no JAX."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jaxllm.cli.shared_options import MODEL, path_option
from jaxllm.formats import WEIGHT_FORMATS
from jaxllm.options import Command, click_options, combined
from jaxllm.training.settings import TrainSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jaxllm.training.data.sources import Source

Options = TypeVar("Options", bound="DataclassInstance")
LOOP_SETTINGS = ("steps", "accumulate", "precision", "remat", "evaluation_batches")


class _LocalPath(click.Path):
    """A local output path: a URL would make a local folder of that name."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "://" in str(value):
            of_run = param is not None and param.name == "run_dir"
            hint = "; --checkpoints takes gs:// and s3://" if of_run else ""
            self.fail(
                f"{value} is a URL, and this is a path of this machine or of a mounted file system{hint}"
            )
        return super().convert(value, param, ctx)


class _PathOrUrl(click.Path):
    """A path, or a URL unchanged: a Path would merge its slashes."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if "://" in str(value) else super().convert(value, param, ctx)


output_option = path_option("-o", "--output", required=True, type=_LocalPath(), help="The bundle to write.")
run_option = path_option(
    "--run",
    "run_dir",
    required=True,
    type=_LocalPath(),
    metavar="RUN",
    help="The run's folder, made if missing. The same command on the same folder resumes.",
)
name_option = click.option(
    "--name", default="", metavar="NAME", help="The model's display name.  [default: the folder's own]"
)
teacher_option = path_option(
    "--teacher",
    type=MODEL,
    metavar="MODEL",
    help="A Hugging Face folder of a teacher with the same tokenizer, for a recipe with a teacher_share.",
)
tensorboard_option = click.option(
    "--tensorboard", is_flag=True, help="Also write TensorBoard events into RUN/tensorboard."
)


def text_option(use: str, default: str) -> Callable[[Command], Command]:
    """--text: parameter `texts`, files for the named use."""
    return click.option(
        "--text",
        "texts",
        multiple=True,
        type=_PathOrUrl(),
        metavar="FILE",
        help=f"A UTF-8 text file to {use}; also a folder of .txt files, or a pattern. Repeatable.  "
        f"[default: {default}]",
    )


chat_options = combined(
    click.option(
        "--chat",
        "chats",
        multiple=True,
        type=_PathOrUrl(),
        metavar="FILE",
        help="JSON lines or parquet with messages, or prompt and completion, whose answers are learned: a "
        "file, a folder or a pattern. Repeatable.  [default: the recipe's sources]",
    ),
    click.option("--skip-bad", is_flag=True, help="Skip malformed lines of --chat instead of failing."),
)


def pairs_options(use: str, *, several: bool = False) -> Callable[[Command], Command]:
    """--pairs and --prefix of commands that accept encoder-decoders.

    Args:
      use: purpose of the pairs, such as "measure on".
      several: whether both may be repeated. Parameter `pairs` is then a tuple of (source, target), and
        `prefix` one of texts; else `pairs` is (source, target) and `prefix` a text, or each None.
    """
    again = " Repeatable." if several else ""
    each = ". Repeatable, one for each --pairs" if several else ""
    file = click.Path(path_type=Path)
    return combined(
        click.option(
            "--pairs",
            type=(file, file),
            metavar="SOURCE TARGET",
            multiple=several,
            help=f"For an encoder-decoder: two UTF-8 text files to {use}, whose lines of the same number "
            f"are a source and its target.{again}",
        ),
        click.option(
            "--prefix",
            metavar="TEXT",
            multiple=several,
            help=f"With --pairs: the prefix of the task{each}.  [default: the model's own prefix]",
        ),
    )


def given_sources(
    texts: Sequence[Path | str],
    chats: Sequence[Path | str],
    skip_bad: bool,
    pairs: Sequence[tuple[Path, Path]] = (),
    prefixes: Sequence[str] = (),
) -> "tuple[Source, ...]":
    """The sources given by --text, --chat, --skip-bad, --pairs and --prefix; empty for the recipe's."""
    from jaxllm.training.data.sources import Source, source_name

    plain = (Source(text=source_name(path)) for path in texts)
    talks = (Source(chat=source_name(path), skip_bad=skip_bad) for path in chats)
    if prefixes and len(prefixes) != len(pairs):
        raise click.UsageError(
            f"{len(pairs)} --pairs and {len(prefixes)} --prefix: give one for each, or none"
        )
    read = (
        Source(pairs=(str(source), str(target)), prefix=prefix)
        for (source, target), prefix in zip(pairs, prefixes or [None] * len(pairs), strict=True)
    )
    return (*plain, *talks, *read)


tokenizer_option = path_option(
    "--tokenizer", help="A tokenizer.json of another run, to share its tokens.  [default: train one]"
)


# Options of the loop, None for the recipe's: parameters of `LOOP_SETTINGS`.
loop_options = click_options(TrainSettings, *LOOP_SETTINGS, default="the recipe's")


def changed(recipe: Options, options: dict[str, Any], *names: str) -> Options:
    """The recipe with the values of the named options, which are removed from `options`; None keeps the
    recipe's value."""
    given = {name: options.pop(name) for name in names}
    return dataclasses.replace(recipe, **{name: each for name, each in given.items() if each is not None})


def weights_option(of: str, default: str = "the checkpoint's own") -> Callable[[Command], Command]:
    """--weights: parameter `weights`, None for the default."""
    return click.option(
        "--weights", type=click.Choice(WEIGHT_FORMATS), help=f"Width of {of}.  [default: {default}]"
    )


def device_options(
    mesh: str = "all along data", devices: str = "one per core"
) -> Callable[[Command], Command]:
    """--mesh and --cpu-devices, parameters `mesh` and `devices`, with their defaults for the help."""
    return combined(
        click.option(
            "--mesh",
            metavar="AXIS=N,...",
            help=f"Devices per axis, such as data=2,fsdp=2,tensor=2.  [default: {mesh}]",
        ),
        click.option(
            "--cpu-devices",
            "devices",
            type=click.IntRange(min=1),
            metavar="N",
            help=f"Make N JAX devices of this machine's CPU.  [default: {devices}]",
        ),
    )


def one_device_option(reason: str) -> Callable[[Command], Command]:
    """--mesh of a command that runs on one device only: rejects every other mesh with the reason."""

    def check(context: click.Context, option: click.Parameter, mesh: str | None) -> None:
        del option
        if mesh is None:
            return
        from jaxllm.errors import ConfigError
        from jaxllm.training.loop.parallel import MeshShape

        shape = MeshShape.parse(mesh)
        if max(shape.data, 1) * shape.fsdp * shape.tensor > 1:
            command = context.command_path.partition(" ")[2]
            raise ConfigError(f"{command} runs on one device, not on --mesh {mesh}: {reason}; leave it out")

    return click.option(
        "--mesh",
        metavar="AXIS=N,...",
        callback=check,
        expose_value=False,
        help=f"One device only (data=1): {reason}.",
    )


dry_run_option = click.option(
    "--dry-run",
    "dry_run",
    metavar="DEVICE",
    help="Train nothing: compile the step, or that of each stage, and print memory per device and time per "
    "step on DEVICE, such as H100, as a JSON object. With --cpu-devices N and --mesh, N CPU devices emulate "
    "it.",
)


# Of every training: where it runs, and what is traced of it.
machine_options = combined(
    click.option(
        "--profile",
        type=_LocalPath(),
        metavar="DIR",
        help="Trace steps 3 to 5 with JAX's profiler into DIR, for xprof or TensorBoard.",
    ),
    dry_run_option,
    device_options(),
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Address of the first process of several that train together.  [default: that of SLURM, Open "
        "MPI or a TPU's host; without any this process trains alone]",
    ),
    click.option("--processes", type=click.IntRange(min=1), metavar="N", help="Number of these processes."),
    click.option("--process", type=click.IntRange(min=0), metavar="N", help="Index of this process, from 0."),
)


def run_options(recipe: str) -> Callable[[Command], Command]:
    """Options of the run's folder, its recipe (parameter `recipe_name`) and data; `recipe` is the default."""
    return combined(
        run_option,
        click.option(
            "--checkpoints",
            metavar="URL",
            help="Store checkpoints at gs://bucket/path or s3://bucket/path instead of in RUN.",
        ),
        click.option(
            "--recipe",
            "recipe_name",
            default=recipe,
            show_default=True,
            metavar="RECIPE",
            help="A recipe's name, or a .toml file.",
        ),
        path_option("--data", type=_LocalPath(), metavar="DIR", help="The folder of the recipe's sources."),
    )


def set_devices(devices: int | None) -> None:
    """Makes `devices` CPU devices in this process; possible only before JAX uses one."""
    import jax

    from jaxllm.kernels import native

    # In a container or under taskset a process may use fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", devices or cores)
    # Each CPU device computes in a stream: together they should keep every core busy, and no more.
    native.set_threads(max(1, cores // (devices or cores)))


def keep_compilations() -> None:
    """Caches compiled steps in the user's cache folder for later runs: not on CPUs, whose programs are
    specific to a processor, nor if JAX_COMPILATION_CACHE_DIR is set. Initializes a device.

    Raises:
      ConfigError: see `require_usable_jax`.
    """
    import jax
    import platformdirs

    from jaxllm.host_settings import require_usable_jax

    require_usable_jax()
    if jax.default_backend() != "cpu" and jax.config.values["jax_compilation_cache_dir"] is None:
        folder = os.environ.get("JAXLLM_CACHE") or platformdirs.user_cache_dir("jaxllm")
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "steps"))
