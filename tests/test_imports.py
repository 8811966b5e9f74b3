"""The house rule: who may import whom, and who may touch clocks, threads and files. Read, not run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.house import import_order, stated_packages

ROOT = Path(__file__).parents[1]

# Package -> the other packages of the house that it may import.
MAY_IMPORT = stated_packages()
# The core's rooms from the ground up: each stands on the ones before it (docs/architecture.md lists them).
ROOMS = tuple(room for room in import_order("jaxllm") if room != "assets")
# Imports by name, at run time. The command line names every room's commands as strings and imports one
# when it runs, which ties no room to another; so does the front door with public names, which it also
# imports where types are checked. Nothing else of the core knows of the packages above it.
COMMAND_LINE, FRONT_DOOR = "serving/cli.py", "jaxllm/__init__.py"
# Imports the commands that the command line names.
LAZY_COMMANDS = "serving/commands/lazy.py"
# Imports what a device may need, to find out whether it can.
LOOP_FINDER = "export/loop_modules.py"

# The core is pure functions over arrays: whoever calls it brings the time and the threads.
CLOCKS_AND_THREADS = {
    "time", "sched", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "queue", "signal",
    "subprocess", "socket",
}  # fmt: skip
CLOCK_CALLS = {"now", "utcnow", "today"}
FILE_ROOMS = {"files", "bundle", "checkpoints", "prepare", "program_folder", "tasks"}
# The native kernels belong to the process, as their threads do: their door alone reads its environment
# (which kernels, how many threads) and asks how many processors it may use. Of `os` it takes nothing else.
PROCESS_FILE = "jaxllm/kernels/native.py"
# Tokenizers and templates of unknown cost are bounded by the system, in a child process: its door may start
# and wait for it. Nobody else does.
CHILD_FILE = "jaxllm/text/child_process.py"
PROCESS_NAMES = {"environ", "sched_getaffinity", "cpu_count"}
FILE_MODULES = {
    "os", "pathlib", "io", "mmap", "tempfile", "shutil", "glob", "zipfile", "tarfile", "fileinput",
    "safetensors", "importlib.resources", "ctypes", "pickle",
}  # fmt: skip
FILE_CALLS = {
    "open", "read_text", "write_text", "read_bytes", "write_bytes", "from_file", "memmap", "fromfile",
    "tofile", "loadtxt", "savetxt", "savez", "savez_compressed", "genfromtxt",
}  # fmt: skip


def files_of(package: str) -> list[str]:
    """Its modules, as paths from the root."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))


CORE = files_of("jaxllm")
FILES = [file for package in MAY_IMPORT for file in files_of(package)]


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports_of(source: str, file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement, wherever it stands."""
    package = list(Path(file).parent.parts)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module.split(".") if node.module else [])])
            for name in node.names:
                dotted = f"{base}.{name.name}"
                yield node.lineno, dotted if is_module(dotted) else base


def calls_of(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every call, `f` for both f() and x.f()."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.lineno, node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def uses_of(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, name) of everything taken from `module`, by a dot or by getattr; "?" for what cannot be read."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == module:
                yield node.lineno, name
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=owner), name, *_]) if (
                owner == module
            ):
                yield node.lineno, name.value if isinstance(name, ast.Constant) else "?"
            case ast.ImportFrom(module=owner, names=names) if owner == module:
                yield from ((node.lineno, each.name) for each in names)
            case ast.Import(names=names) if any(each.name == module and each.asname for each in names):
                yield node.lineno, "?"


def room_of(dotted: str) -> str:
    """The core's room that a module belongs to; the package itself is the ground ("")."""
    return [*dotted.split("."), ""][1]


def module_name(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")


def typing_lines(source: str) -> set[int]:
    """Lines of what only type checkers run: bodies of `if TYPE_CHECKING`."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for each in node.body
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }


def import_faults(source: str, file: str) -> list[str]:
    faults = []
    package = Path(file).parts[0]
    skipped = typing_lines(source) if file == FRONT_DOOR else set()
    for line, dotted in imports_of(source, file):
        if line in skipped:
            continue
        target = dotted.split(".")[0]
        if target == "tests":
            faults.append(f"{file}:{line} imports {dotted}: nothing in the house imports its tests")
        elif target in MAY_IMPORT and target != package and target not in MAY_IMPORT[package]:
            allowed = ", ".join(MAY_IMPORT[package]) or "none of the others"
            faults.append(f"{file}:{line} imports {dotted}: {package} may import {allowed}")
        elif target == package == "jaxllm":
            faults += room_faults(file, line, dotted)
    return faults


def room_faults(file: str, line: int, dotted: str) -> list[str]:
    here, there = room_of(module_name(file)), room_of(dotted)
    if here == there or not there:
        return []
    for room in (here, there):
        if room and room not in ROOMS:
            return [f"{file}:{line}: the room {room!r} has no place in docs/architecture.md; give it one"]
    if not here or ROOMS.index(there) > ROOMS.index(here):
        return [
            f"{file}:{line} imports {dotted}: {here or 'the package'} stands below {there}; the order is "
            + " < ".join(ROOMS)
        ]
    return []


def purity_faults(source: str, file: str) -> list[str]:
    faults = []
    with_files = room_of(module_name(file)) in FILE_ROOMS
    for line, dotted in imports_of(source, file):
        names = {dotted, dotted.split(".")[0]}
        if file == CHILD_FILE:
            continue
        if names & CLOCKS_AND_THREADS:
            faults.append(f"{file}:{line} imports {dotted}: the core has no clocks and no threads")
        if file == PROCESS_FILE and dotted == "os":
            continue
        if names & FILE_MODULES and not with_files:
            faults.append(f"{file}:{line} imports {dotted}: only {sorted(FILE_ROOMS)} touch files")
    if file == PROCESS_FILE:
        faults += [
            f"{file}:{line} uses os.{name}: of the process it may know {sorted(PROCESS_NAMES)}"
            for line, name in uses_of(source, "os")
            if name not in PROCESS_NAMES
        ]
    for line, name in calls_of(source):
        if name in CLOCK_CALLS:
            faults.append(
                f"{file}:{line} calls {name}(): the core reads no clock; take the time as an argument"
            )
        if name in FILE_CALLS and not with_files:
            faults.append(f"{file}:{line} calls {name}(): only {sorted(FILE_ROOMS)} touch files")
    return faults


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


# The house


@pytest.mark.parametrize("file", FILES)
def test_imports_go_down(file):
    assert not import_faults(read(file), file)


@pytest.mark.parametrize("file", CORE)
def test_core_has_no_clock_no_threads_and_few_files(file):
    assert not purity_faults(read(file), file)


def test_every_room_is_there():
    """So that an order which the house has outgrown is seen, and the walk is not of an empty folder."""
    assert {room_of(module_name(file)) for file in CORE} - {""} == set(ROOMS)
    for package in MAY_IMPORT:
        assert files_of(package), package
    assert len(CORE) > 30


@pytest.mark.parametrize("file", FILES)
def test_imports_by_name_are_in_few_places(file):
    names = {name for _, name in calls_of(read(file))}
    by_name = names & {"import_module", "__import__", "run_module", "run_path"}
    assert not by_name or file in (LAZY_COMMANDS, FRONT_DOOR, LOOP_FINDER)


def named_modules(file: str) -> list[str]:
    """Strings that name a module of the house, with or without `:attribute`."""
    pattern = re.compile(rf"(?:{'|'.join(MAY_IMPORT)})(?:\.\w+)+(?::\w+)?")
    strings = (node.value for node in ast.walk(ast.parse(read(file))) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and pattern.fullmatch(text)]


def test_front_door_names_what_serving_may_import():
    named = named_modules(FRONT_DOOR)
    assert named
    for dotted in named:
        assert is_module(dotted), dotted
        assert dotted.split(".")[0] in ("serving", *MAY_IMPORT["serving"])


def test_every_command_is_there():
    """The exception: the command line may name any package's commands."""
    named = named_modules(COMMAND_LINE)
    assert len(named) > 5
    for target in named:
        dotted, attribute = target.split(":")
        assert dotted.split(".")[0] in MAY_IMPORT
        source = read(dotted.replace(".", "/") + ".py")
        defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        assert attribute in defined, target


# The rule itself


@pytest.mark.parametrize(
    ("file", "source", "part"),
    [
        ("jaxllm/quant/formats.py", "import serving.engine", "jaxllm may import none"),
        ("jaxllm/prepare.py", "def f():\n    from training import data", "jaxllm/prepare.py:2"),
        ("training/loop/trainer.py", "from serving.engine import Engine", "training may import jaxllm"),
        ("serving/engine.py", "from benchmarks.measuring.report import Row", "serving may import jaxllm"),
        ("export/tflite.py", "import benchmarks", "export may import jaxllm, serving"),
        ("benchmarks/engine.py", "import training.loop.trainer as loop", "jaxllm, serving"),
        ("serving/engine.py", "from tests import tiny", "imports its tests"),
        ("jaxllm/config.py", "from jaxllm.quant import QArray", "config stands below quant"),
        ("jaxllm/config.py", "from jaxllm import quant", "config stands below quant"),
        ("jaxllm/quant/formats.py", "from jaxllm.kernels import native", "quant stands below kernels"),
        ("jaxllm/kernels/converted.py", "from ..nn.linear import embed", "kernels stands below nn"),
        ("jaxllm/kv/cache.py", "if True:\n    import jaxllm.models.decoder", "kv stands below models"),
        ("jaxllm/__init__.py", "from jaxllm.errors import JaxllmError", "the package stands below errors"),
        (
            "jaxllm/__init__.py",
            "if TYPE_CHECKING:\n    pass\nimport serving.engine",
            "jaxllm may import none",
        ),
        ("jaxllm/kv/cache.py", "if TYPE_CHECKING:\n    import serving.engine", "jaxllm may import none"),
        ("jaxllm/novelty.py", "from jaxllm.errors import JaxllmError", "'novelty' has no place"),
        ("jaxllm/steps/model.py", "import jaxllm.novelty", "'novelty' has no place"),
    ],
)
def test_rule_sees_a_wrong_import(file, source, part):
    (fault,) = import_faults(source, file)
    assert part in fault


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("jaxllm/quant/weights.py", "import jax.numpy as jnp\nfrom jaxllm.errors import ConfigError"),
        ("jaxllm/bundle/writer.py", "import jaxllm\nfrom jaxllm import __version__"),
        ("jaxllm/kernels/converted.py", "from . import converted\nfrom ..quant import QArray"),
        ("benchmarks/engine.py", "from serving.engine import Engine\nimport jaxllm.steps.model"),
        ("training/loop/trainer.py", "from training.data import windows\nfrom jaxllm.models import decoder"),
        ("jaxllm/steps/model.py", "import servings, testsuite"),
        ("jaxllm/__init__.py", "if TYPE_CHECKING:\n    from serving.engine import Engine"),
    ],
)
def test_rule_lets_a_right_import_pass(file, source):
    assert import_faults(source, file) == []


@pytest.mark.parametrize(
    ("file", "source", "part"),
    [
        ("jaxllm/steps/model.py", "import time", "no clocks"),
        ("jaxllm/prepare.py", "from time import perf_counter", "no clocks"),
        ("jaxllm/bundle/reader.py", "from concurrent.futures import ThreadPoolExecutor", "no threads"),
        ("jaxllm/kv/cache.py", "def f():\n    import threading", "jaxllm/kv/cache.py:2"),
        ("jaxllm/text/tokenizer.py", "import datetime\ndatetime.datetime.now()", "reads no clock"),
        ("jaxllm/quant/formats.py", "data = open('x').read()", "touch files"),
        ("jaxllm/config.py", "def f(path):\n    return path.open()", "jaxllm/config.py:2"),
        ("jaxllm/config.py", "path.read_text()", "touch files"),
        ("jaxllm/text/tokenizer.py", "from pathlib import Path", "touch files"),
        ("jaxllm/kernels/native.py", "import importlib.resources", "touch files"),
        ("jaxllm/kernels/native.py", "import os\nos.listdir()", "uses os.listdir"),
        ("jaxllm/kernels/native.py", "import os\ngetattr(os, 'remove')('x')", "uses os.remove"),
        ("jaxllm/kernels/native.py", "import os as system", "uses os.?"),
        ("jaxllm/kernels/native.py", "from os import path", "uses os.path"),
        ("jaxllm/kernels/converted.py", "import os\nos.environ['X']", "touch files"),
        ("jaxllm/quant/blocks.py", "import numpy as np\nnp.memmap('x')", "touch files"),
    ],
)
def test_rule_sees_a_clock_a_thread_and_a_file(file, source, part):
    (fault,) = purity_faults(source, file)
    assert part in fault


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("jaxllm/bundle/reader.py", "import mmap, os\nopen('x')"),
        ("jaxllm/files/atomic.py", "from pathlib import Path\nPath('x').write_bytes(b'')"),
        ("jaxllm/text/tokenizer.py", "import datetime\ndef f(now: datetime.datetime): ..."),
        ("jaxllm/steps/model.py", "import dataclasses, math, functools\nimport jax"),
        ("jaxllm/kernels/native.py", "import os\nos.environ.get('X')\ngetattr(os, 'cpu_count', None)"),
    ],
)
def test_rule_lets_the_rest_pass(file, source):
    assert purity_faults(source, file) == []
