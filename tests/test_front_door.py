"""`from jaxllm import ...`: every public name, and nothing imported before it is used."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jaxllm

SOURCE = ast.parse(Path(jaxllm.__file__).read_text(encoding="utf-8"))
IMPORTED = """
import sys
import jaxllm
print(*sorted({name.split(".")[0] for name in sys.modules} & {"jax", "numpy", "flax"}))
print(*sorted(name for name in sys.modules if name.startswith("jaxllm.") and name != "jaxllm.version"))
"""


@pytest.mark.parametrize("name", jaxllm.__all__)
def test_a_public_name_is_defined_where_the_list_says(name: str) -> None:
    home = jaxllm._HOMES[name]
    value = getattr(jaxllm, name)
    assert value is getattr(importlib.import_module(home), name)
    # Else a type would be named after a module that only passes it on.
    assert getattr(value, "__module__", home) == home


def test_all_lists_agree() -> None:
    typed = {
        alias.name: node.module
        for block in SOURCE.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == jaxllm._HOMES
    assert set(dir(jaxllm)) == {*jaxllm.__all__, "__version__"}


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'jaxllm' has no attribute 'Motor'"):
        jaxllm.Motor  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
