"""No file is too long, no function takes too many parameters, no code asks which runner it has, and budgets
and campaigns name what there is."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.budgets import BUDGETS_FILE, LOADING, ROOT, is_campaign, read_campaigns

PACKAGES = ("jaxllm", "serving", "training", "export", "benchmarks")
FOLDERS = (*PACKAGES, "tests", "examples")
MOST_LINES, MOST_PARAMETERS = 600, 8

# Bindings have the parameters of their kernels.
BINDINGS = ("jaxllm/kernels/native*.py",)
# Commands have a parameter for each option.
COMMANDS = (
    "jaxllm/cli/*.py",
    "jaxllm/cli/*/*.py",
    "benchmarks/train/__init__.py",
    "benchmarks/trace_command.py",
)
# File -> functions whose parameters hypothesis draws: they are the sizes of one case.
DRAWN = {
    "tests/kernels/test_attention.py": {"case", "test_any_shape"},
    "tests/kernels/test_products.py": {"check_feed_forward", "test_feed_forward_of_any_shape"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> Iterator[Path]:
    """All modules below some folders of the repository."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def functions(source: str) -> Iterator[Function]:
    """All functions of a module, nested ones and methods among them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            yield node


def parameters(function: Function) -> int:
    """How many parameters a function has, without `self` and `cls`; `*args` and `**kwargs` are one each."""
    stated = function.args
    names = [each.arg for each in (*stated.posonlyargs, *stated.args, *stated.kwonlyargs)]
    own = len(names) - (names[:1] in (["self"], ["cls"]))
    return own + (stated.vararg is not None) + (stated.kwarg is not None)


def is_command(function: Function) -> bool:
    """Whether click calls a function with an argument for each of its options."""
    names = [ast.unparse(each).split("(")[0] for each in function.decorator_list]
    return any(name.endswith(("command", "argument", "option")) for name in names)


def asked_runners(source: str) -> list[str]:
    """The checks of a module whether something is of a class whose name ends in Runner."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "isinstance"
        and any(_name(each).endswith("Runner") for each in ast.walk(node.args[1]))
    ]


def bucket_unions(source: str) -> list[str]:
    """The names of a module that stand for one of several families of buckets, and the fields by which a
    bucket would tell its kind."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.BinOp | ast.Subscript):
            names = [_name(each) for each in ast.walk(node.value)]
            union = isinstance(node.value, ast.BinOp) or "Union" in names
            if union and sum(name.endswith("Bucket") for name in names) > 1:
                found.append(ast.unparse(node))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Bucket"):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found += [f"{node.name}.kind" for each in fields if _name(each) == "kind"]
    return found


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def exempted(path: Path, function: Function) -> bool:
    """Whether a function may have as many parameters as it likes."""
    local = path.relative_to(ROOT)
    if any(local.match(each) for each in BINDINGS):
        return True
    if any(map(local.match, COMMANDS)) and (is_command(function) or "command" in function.name):
        return True
    return function.name in DRAWN.get(local.as_posix(), set())


def crowded() -> dict[str, set[str]]:
    """File -> functions with too many parameters."""
    found: dict[str, set[str]] = {}
    for path in python_files(*FOLDERS):
        for each in functions(path.read_text(encoding="utf-8")):
            if parameters(each) > MOST_PARAMETERS and not exempted(path, each):
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(each.name)
    return found


def test_no_file_is_too_long() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*FOLDERS)}
    assert {path: size for path, size in sizes.items() if size > MOST_LINES} == {}


def test_no_function_has_too_many_parameters() -> None:
    assert crowded() == {}


def test_exemptions_are_needed() -> None:
    for file, names in DRAWN.items():
        found = {each.name: parameters(each) for each in functions((ROOT / file).read_text(encoding="utf-8"))}
        assert all(found.get(name, 0) > MOST_PARAMETERS for name in names), file


@pytest.mark.parametrize("forbidden", [asked_runners, bucket_unions])
def test_nobody_asks_which_runner_it_is_and_buckets_have_no_kinds(
    forbidden: Callable[[str], list[str]],
) -> None:
    found = {path: forbidden(path.read_text(encoding="utf-8")) for path in python_files(*PACKAGES)}
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("rule", "source", "expected"),
    [
        (lambda source: [parameters(each) for each in functions(source)], "def f(a, /, b, *, c): ...", [3]),
        (lambda source: [parameters(each) for each in functions(source)], "def f(self, a, **c): ...", [2]),
        (
            lambda source: [is_command(each) for each in functions(source)],
            "@cli.command()\ndef f(): ...",
            [True],
        ),
        (asked_runners, "isinstance(x, int | LayerwiseRunner)", ["isinstance(x, int | LayerwiseRunner)"]),
        (
            bucket_unions,
            "AnyBucket = PrefillBucket | DecodeBucket",
            ["AnyBucket = PrefillBucket | DecodeBucket"],
        ),
        (bucket_unions, "class Bucket:\n    kind: str", ["Bucket.kind"]),
    ],
)
def test_rules_see_what_they_forbid(rule: Callable[[str], object], source: str, expected: object) -> None:
    assert rule(source) == expected


def test_budgets_and_campaigns_name_what_there_is():
    folders = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("*/")}
    assert set(json.loads(BUDGETS_FILE.read_text(encoding="utf-8"))) <= folders | {"(top)", LOADING}
    for pattern, instead in read_campaigns().items():
        for node in (pattern, instead):
            file, _, test = node.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            tests = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
            assert test.partition("[")[0] in tests, node
        assert not is_campaign(instead, read_campaigns()), f"{instead} is a campaign itself"
