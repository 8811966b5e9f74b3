"""`python -m jaxllm.cli.device DIR [COMMAND]`: answers, chats and profiles with a folder of programs."""

import copy
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from jaxllm.cli.console import answer_facts, draft_facts, print_json, progress_bars, read_text
from jaxllm.cli.lazy import run_command
from jaxllm.cli.model_choice import speculation
from jaxllm.cli.shared_options import (
    answer_options,
    json_option,
    listening_options,
    model_sampling_option,
    path_argument,
    path_option,
    sampling_options,
    task_option,
)
from jaxllm.config import FULL_LEVEL
from jaxllm.contexts.codecs import RAW, WIDTHS
from jaxllm.errors import ConfigError
from jaxllm.export.device.opening import (
    device_profile,
    longest_cache_bytes,
    needed_bytes,
    open_device,
    profile_path,
    weights_bytes,
)
from jaxllm.export.folder_format.manifest import LOOP, STORE
from jaxllm.export.programs.executor import Accelerator
from jaxllm.export.programs.model import ProgramModel
from jaxllm.option_types import Level, Size
from jaxllm.options import combined
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.engine.step import Answer
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.host.machine import process_age_ms
from jaxllm.serving.host.process_memory import process_memory, proportional_bytes
from jaxllm.text.prompts import Prompt

if TYPE_CHECKING:
    from jaxllm.export.device.service import ProgramService
    from jaxllm.export.device.store import ModelStore

# Modules that only some commands need are imported there: each takes memory.
_BUDGET = "256MB"
# Additional packages of `serve`.
SERVING_PACKAGES = (
    "cryptography httptools jsonschema llguidance msgspec prometheus_client starlette uvicorn uvloop"
)


# Runs a loop on a folder: python -c ... LOOP FOLDER [COMMAND].
_RUN_LOOP = (
    "import pathlib, sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from jaxllm.cli.device.__main__ import main; main(pathlib.Path(sys.argv.pop(1)))"
)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """Values of the options before the command (see `open_device`), and the age of the process after all
    imports; None if the system does not report it.

    Attributes:
      place: folder of the programs, or of a store of them.
      options: arguments with which another process opens a folder with the same means.
    """

    place: Path
    options: Sequence[str]
    threads: int
    memory_bytes: int
    drafts: SpeculationOptions | None
    processors: int
    accelerator: Accelerator
    adapter: str | None
    imported_ms: float | None

    @property
    def store(self) -> "ModelStore | None":
        """The store of the programs; None for a folder of them."""
        if not (self.place / STORE).is_file():
            return None
        from jaxllm.export.device.store import ModelStore

        return ModelStore(self.place)

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the programs: in a store, that in use once an update was tried."""
        if (store := self.store) is None:
            return self.place
        # Else an installed loop runs every folder, and none of its code.
        of_store, before = Path(__file__).is_relative_to(store.folder), store.state.using

        def trials(update: Path) -> list[list[str]]:
            if not of_store:
                return [[sys.executable, "-m", "jaxllm.cli.device", *self.options, str(update), "facts"]]
            # The update's loop must know this store, too.
            known = [sys.executable, "-c", _RUN_LOOP, str(update / LOOP), str(store.folder), "status"]
            return [known, [sys.executable, str(update), *self.options, "facts"]]

        folder = store.settled(trials)
        if of_store and folder.name != before:
            # With the update's loop.
            os.execv(sys.executable, sys.orig_argv)
        return folder

    def open(self, level: int = FULL_LEVEL) -> Engine[ProgramModel]:
        """Opens the engine at a level."""
        engine = open_device(
            self.folder,
            level=level,
            threads=self.threads,
            memory_bytes=self.memory_bytes,
            drafts=self.drafts,
            processors=self.processors,
            accelerator=self.accelerator,
        )
        engine.set_adapter(self.adapter)
        return engine

    def serve(self, folder: Path | None, budget_bytes: int, context_bits: int) -> "ProgramService":
        """Opens the service, with contexts if there is a folder for them."""
        from jaxllm.export.device.service import ProgramService

        with progress_bars() as progress:
            return ProgramService.open(
                self.open(),
                threads=self.threads,
                contexts=folder,
                budget_bytes=budget_bytes,
                context_bits=context_bits,
                progress=progress,
            )


_level_option = click.option(
    "--level", type=Level(), default=FULL_LEVEL, help="The sub-model that answers.  [default: 100]"
)
# Passed to the command as `folder`, `budget_bytes` and `context_bits`.
_context_options = combined(
    path_option("--contexts", "folder", metavar="DIR", help="Store contexts there."),
    click.option(
        "--budget",
        "budget_bytes",
        type=Size(),
        default=_BUDGET,
        help=f"Memory limit of contexts' chunks.  [default: {_BUDGET}]",
    ),
    click.option(
        "--context-bits",
        type=click.Choice([RAW, *WIDTHS]),
        default=RAW,
        help="Bits of stored values, by programs of the folder (jaxllm export --codec); 0 stores the cache "
        "unchanged.  [default: 0]",
    ),
)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error. Goes before everything else.")
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    help="Number of compute threads.  [default: all cores of this process]",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=Size(),
    default=0,
    help="Memory limit of weights, caches and logits.  [default: no limit]",
)
@click.option(
    "--draft",
    metavar="DRAFT",
    default="none",
    help="Draft tokens for the programs to verify: ngram, level:PERCENT, or another folder of programs.  "
    "[default: none]",
)
@click.option(
    "--processors",
    type=click.IntRange(1, 2),
    default=1,
    help="2 runs the stages of a w8a8 folder (--stages) on two groups of cores, out of order.  [default: 1]",
)
@click.option(
    "--accelerator",
    type=click.Choice(get_args(Accelerator)),
    default="cpu",
    help="What runs a TFLite folder; the CPU does where the GPU cannot or errs.  [default: cpu]",
)
@click.option(
    "--adapter",
    metavar="NAME",
    help="Answer with this adapter, which was exported with the model (--adapter-input); for `serve` calls "
    "name it instead.  [default: none]",
)
@path_argument("folder")
@click.pass_context
def device(
    context: click.Context,
    debug: bool,
    threads: int,
    memory_bytes: int,
    draft: str,
    adapter: str | None,
    folder: Path,
    **runs: Any,
) -> None:
    """Run the programs in FOLDER, which `jaxllm export --format device` wrote, or those in use of a store.

    Without a command, talk with the model.

    \b
    Example:
      python -m jaxllm.cli.device programs generate --prompt "Once upon a time"
    """
    del debug
    means = {"threads": threads, "memory": memory_bytes, **runs}
    context.obj = _Choice(
        place=folder,
        options=[part for name, value in means.items() for part in (f"--{name}", str(value))],
        threads=threads,
        memory_bytes=memory_bytes,
        drafts=speculation(draft),
        adapter=adapter,
        imported_ms=process_age_ms(),
        **runs,
    )
    if context.invoked_subcommand is None:
        context.invoke(chat_command)


@device.command("chat")
@click.option("--system", metavar="TEXT", help="The system message.")
@_level_option
@sampling_options
@click.pass_obj
def chat_command(choice: _Choice, system: str | None = None, level: int = FULL_LEVEL, **options: Any) -> None:
    """Talk with the model in the terminal, one turn per line."""
    from jaxllm.cli.chat import Conversation
    from jaxllm.cli.screen import PlainScreen

    asked, engine = answer_options(options), choice.open(level)
    config = asked.of(engine.tokenizer.files)
    Conversation(engine, config, PlainScreen(), system=system, reopen=choice.open).run()


@device.command("generate")
@click.option(
    "-p", "--prompt", "prompts", multiple=True, metavar="TEXT",
    help="The text to continue. Repeatable.  [default: standard input]",
)  # fmt: skip
@_level_option
@task_option
@sampling_options
@json_option
@click.pass_obj
def generate_command(
    choice: _Choice, prompts: tuple[str, ...], level: int, as_json: bool, **options: Any
) -> None:
    """Continue prompts, streaming the text."""
    asked, engine = answer_options(options), choice.open(level)
    config = asked.of(engine.tokenizer.files)
    answers = [engine.stream(each, config) for each in prompts or (read_text(None),)]
    facts = [_shown(each, as_json=as_json) for each in answers]
    if as_json:
        print_json({"answers": facts, **draft_facts(engine.speculation), **_costs(choice, engine)})


@device.command("call")
@click.option("-p", "--prompt", metavar="TEXT", help="The user's text.  [default: standard input]")
@click.option("--instruction", default="", metavar="TEXT", help="Text before the prompt.")
@click.option("--slo", metavar="<TTFT,TPOT>", help="Shares of the whole model's times, in percent.")
@click.option("--strict", is_flag=True, help="Reject the call if no level meets the objective.")
@click.option("--app", default="device", help="The app that owns the context.  [default: device]")
@click.option("--context", "name", metavar="NAME", help="Continue this context; `new` makes one.")
@_context_options
@task_option
@sampling_options
@json_option
@click.pass_obj
def call_command(
    choice: _Choice, prompt: str | None, instruction: str, name: str | None, as_json: bool, **options: Any
) -> None:
    """Answer a prompt by a plan, or in a context that outlives calls."""
    slo, strict, app, *stored = (
        options.pop(each) for each in ("slo", "strict", "app", "folder", "budget_bytes", "context_bits")
    )
    task, asked_options = options["task"], answer_options(options)
    if task and name is not None:
        raise click.UsageError("--task goes without --context")
    if (stored[0] is None) != (name is None):
        raise click.UsageError("--contexts and --context go together")
    if name is not None and (slo or strict):
        raise click.UsageError("a context keeps its level: leave --slo and --strict out, or --context")
    text = read_text(None) if prompt is None else prompt
    service = choice.serve(*stored)
    config = asked_options.of(service.engine.tokenizer.files)
    try:
        if name is None:
            asked = Prompt(user=text, system=instruction, task=task) if task else text
            answer: Answer = service.call(
                asked, slo=slo, strict=strict, instruction=instruction, max_tokens=config.max_tokens,
                stop=config.stop, sampling=config.sampling,
            )  # fmt: skip
        else:
            new = name == "new"
            adapter = choice.adapter or ""
            context = service.new_context(app, adapter=adapter) if new else service.context(app, name)
            answer, name = context.answer(text, config, instruction=instruction), context.name
        facts = _shown(answer, as_json=as_json)
    finally:
        service.close()
    if as_json:
        # The parts of its context that were of other programs, if any.
        moved = {"moved": list(answer.restoration.moved)} if answer.restoration.moved else {}
        plan = answer.plan and {"level": answer.plan.level, "source": answer.plan.source, "met": answer.met}
        print_json({**facts, "context": name, **moved, **(plan or {}), **_costs(choice, service.engine)})
    elif name is not None:
        click.echo(f"context {name}", err=True)


@device.command("profile")
@json_option
@click.pass_obj
def profile_command(choice: _Choice, as_json: bool) -> None:
    """Measure every level on this device at every prompt length, for later plans."""
    from jaxllm.cli.profile import show_profile

    engine = choice.open()
    with progress_bars() as progress:
        found = device_profile(engine, threads=choice.threads, whole=True, progress=progress)
    path = profile_path(engine, threads=choice.threads)
    if as_json:
        print_json({"model": engine.name, "profile": str(path), **found.to_json()})
        return
    show_profile(found)
    click.echo(f"kept in {path}")


@device.command("serve")
@listening_options
@model_sampling_option
@_context_options
@click.pass_obj
def serve_command(
    choice: _Choice,
    config: Path | None,
    folder: Path | None,
    budget_bytes: int,
    context_bits: int,
    **given: Any,
) -> None:
    """Serve the model to the apps of this device over HTTP or a Unix socket."""
    try:
        # Imported here: no other command needs these packages.
        from jaxllm.export.device.serving import OpenedPrograms, device_options
        from jaxllm.serving.server.daemon import run
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; pip install {SERVING_PACKAGES}") from error
    given = {name: value for name, value in given.items() if value is not None}
    options = dataclasses.replace(device_options(config), model=str(choice.folder), **given)

    def opener(progress: Any) -> OpenedPrograms:
        del progress
        service = choice.serve(folder, budget_bytes, context_bits)
        return OpenedPrograms(service, choice.memory_bytes, options.model_sampling)

    run(options, opener, config=config)


@device.command("store")
@path_argument("path")
@path_option(
    "--key", help="PEM file of the publisher's public ed25519 key, which updates must be signed with."
)
@click.pass_obj
def store_command(choice: _Choice, path: Path, key: Path | None) -> None:
    """Make a store at PATH, which keeps two models: this one, and an update of it.

    \b
    Example:
      python device store model --key public.pem
      python model install update.zip
    """
    from jaxllm.export.device.store import ModelStore

    store = ModelStore.make(path, choice.place, key)
    click.echo(f"{path}: release {store.manifest('a').release}; run it with: python {path}")


@device.command("install")
@path_argument("update")
@click.pass_obj
def install_command(choice: _Choice, update: Path) -> None:
    """Install UPDATE, a folder of `jaxllm export --format device` or a zip file of one, into a store.

    The next start tries it; the model in use answers until then, and afterwards where the update fails.
    """
    click.echo(_store(choice).install(update))


@device.command("status")
@json_option
@click.pass_obj
def status_command(choice: _Choice, as_json: bool) -> None:
    """Show which model a store uses, and what became of the last update."""
    facts = _store(choice).facts()
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        click.echo(f"{name:10}{value}")


@device.command("facts")
@click.option(
    "--calls",
    type=click.IntRange(0, 100_000),
    default=0,
    help="First answer so many calls as a service, of several lengths, with objectives and without.  "
    "[default: 0, which is one answer of 2 tokens]",
)
@json_option
@click.pass_obj
def facts_command(choice: _Choice, calls: int, as_json: bool) -> None:
    """Open the folder and report the times of the imports and in total, and memory."""
    if calls:
        service = choice.serve(None, 0, RAW)
        engine = service.engine
        context = engine.model.executor.manifest.context_tokens
        words = int(64 * context / len(engine.tokenizer.encode("a " * 64)))
        shares = itertools.product((None, "<50,80>"), (64, 16, 4, 2))
        for slo, share in itertools.islice(itertools.cycle(shares), calls):
            service.call("a " * max(1, words // share), slo=slo, max_tokens=max(1, context // 8)).result()
    else:
        engine = choice.open()
        engine.generate("a", GenerationConfig(max_tokens=2, ignore_eos=True))
    facts = _costs(choice, engine)
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        click.echo(f"{name:24}{value}")


def main(argv: Sequence[str] | None = None, *, folder: Path | None = None) -> None:
    """Entry point; `folder` is that of the programs, None if an argument names it."""
    if folder is None:
        run_command(device, "python -m jaxllm.cli.device", argv)
        return
    assert device.callback is not None
    command = copy.copy(device)
    command.params = [each for each in device.params if each.name != "folder"]
    command.callback = functools.partial(device.callback, folder=folder)
    run_command(command, f"python {folder}", argv)


def _store(choice: _Choice) -> "ModelStore":
    if (store := choice.store) is None:
        raise ConfigError(f"{choice.place} is not a store of a model; make one with the command `store`")
    return store


def _shown(answer: Answer, *, as_json: bool) -> dict[str, Any]:
    """Runs an answer, and prints its text unless `as_json`; returns its facts and tokens."""
    if as_json:
        answer.result()
    else:
        for piece in answer:
            click.echo(piece, nl=False)
        click.echo()
    return {"tokens": list(answer.tokens), **answer_facts(answer)}


def _costs(choice: _Choice, engine: Engine[ProgramModel]) -> dict[str, Any]:
    """Time and memory used by the process so far."""
    manifest, age_ms = engine.model.executor.manifest, process_age_ms()
    facts: dict[str, Any] = {
        "import_ms": None if choice.imported_ms is None else round(choice.imported_ms),
        "age_ms": None if age_ms is None else round(age_ms),
        "weights_bytes": weights_bytes(manifest, staged=choice.processors > 1),
        "cache_bytes": longest_cache_bytes(manifest),
        "planned_bytes": needed_bytes(manifest, staged=choice.processors > 1),
    }
    try:
        memory = process_memory()
    except ConfigError:
        # Available on Linux only.
        return facts
    return facts | {
        "peak_memory_bytes": memory.peak,
        "proportional_bytes": proportional_bytes(),
        "anonymous_bytes": memory.anonymous,
    }
