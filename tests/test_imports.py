"""The house rule: who may touch clocks, threads and files, and who imports by name. Read, not run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxllm
from jaxllm.cli.main import COMMANDS
from tests.docs.house import module_files, module_name, room_of, sources_of

ROOT = Path(__file__).parents[1]
# Imports by name, at run time. The command line names every floor's commands as strings and imports one when
# it runs, which ties no room to another; so does a bench's command with what measures it, and the front door
# with public names.
BY_NAME = {
    "jaxllm/cli/lazy.py", "jaxllm/__init__.py", "export/loop_modules.py", "benchmarks/harness/bench.py",
}  # fmt: skip

# The core is pure functions over arrays: whoever calls it brings the time and the threads.
CLOCKS_AND_THREADS = {
    "time", "sched", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "queue", "signal",
    "subprocess", "socket",
}  # fmt: skip
CLOCK_CALLS = {"now", "utcnow", "today"}
FILE_ROOMS = {"files", "bundle", "checkpoints", "prepare", "tasks"}
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


def imports_of(source: str) -> Iterator[tuple[int, set[str]]]:
    """(line, names) of every import statement: its modules, what it takes from them, and their packages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        else:
            continue
        yield node.lineno, names | {name.split(".")[0] for name in names}


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


def purity_faults(source: str, file: str) -> list[str]:
    faults = []
    with_files = room_of(module_name(ROOT / file)) in FILE_ROOMS
    for line, names in imports_of(source):
        dotted = min(names)
        if file == CHILD_FILE:
            continue
        if names & CLOCKS_AND_THREADS:
            faults.append(f"{file}:{line} imports {dotted}: the core has no clocks and no threads")
        if file == PROCESS_FILE and "os" in names:
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


def test_all_modules_in_one_walk() -> None:
    """The core has no clock, no threads and few files; nothing imports the tests, and few import by name."""
    by_name, core = set(), 0
    for module, path in module_files().items():
        source, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        assert not any("tests" in names for _, names in imports_of(source)), module
        if {"import_module", "__import__", "run_module", "run_path"} & {name for _, name in calls_of(source)}:
            by_name.add(file)
    assert by_name <= BY_NAME
    for path in sources_of("jaxllm"):
        file = path.relative_to(ROOT).as_posix()
        assert purity_faults(read(file), file) == []
        core += 1
    assert core > 30


def test_what_is_named_is_there() -> None:
    """The public names of the front door, and the commands of the command line."""
    modules = module_files()
    for named in (jaxllm._HOMES.values(), [target for target, _ in COMMANDS.values()]):
        assert len(named) > 5
        for dotted, _, attribute in (each.partition(":") for each in named):
            defined = ast.parse(modules[dotted].read_text(encoding="utf-8")).body
            names = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
            assert not attribute or attribute in names, dotted


# The rule itself: file, source, and the part that its fault tells; without one there is none.
CASES = [
    ("jaxllm/steps/model.py", "import time", "no clocks"),
    ("jaxllm/bundle/reader.py", "from concurrent.futures import ThreadPoolExecutor", "no threads"),
    ("jaxllm/text/tokenizer.py", "import datetime\ndatetime.datetime.now()", "reads no clock"),
    ("jaxllm/quant/formats.py", "data = open('x').read()", "touch files"),
    ("jaxllm/config.py", "def f(path):\n    return path.open()", "jaxllm/config.py:2"),
    ("jaxllm/kernels/native.py", "import importlib.resources", "touch files"),
    ("jaxllm/kernels/native.py", "import os\ngetattr(os, 'remove')('x')", "uses os.remove"),
    ("jaxllm/kernels/native.py", "import os as system", "uses os.?"),
    ("jaxllm/kernels/converted.py", "import os\nos.environ['X']", "touch files"),
    ("jaxllm/quant/blocks.py", "import numpy as np\nnp.memmap('x')", "touch files"),
    ("jaxllm/bundle/reader.py", "import mmap, os\nopen('x')", ""),
    ("jaxllm/text/tokenizer.py", "import datetime\ndef f(now: datetime.datetime): ...", ""),
    ("jaxllm/kernels/native.py", "import os\nos.environ.get('X')\ngetattr(os, 'cpu_count', None)", ""),
]


@pytest.mark.parametrize(("file", "source", "part"), CASES)
def test_the_rule_sees_a_clock_a_thread_and_a_file_and_lets_the_rest_pass(file, source, part):
    faults = purity_faults(source, file)
    assert len(faults) == bool(part)
    assert part in "".join(faults)
