"""The quick import of JAX leaves a JAX that is whole."""

import os
import subprocess
import sys
from pathlib import Path

from jaxllm.serving.host.jax_import import DEFERRED

_PLUGIN = """
from jaxllm.serving.host.jax_import import import_jax
import_jax()
from jax._src.numpy.array_constructors import rocm_plugin_extension as found
print(found.__name__ if found else None)
"""
_WHOLE = f"""
import gc, importlib.metadata, sys
before = importlib.metadata.distributions, list(sys.meta_path)
from jaxllm.serving.host.jax_import import import_jax
import_jax()
assert (importlib.metadata.distributions, sys.meta_path) == before
assert gc.isenabled()
lazy = {{name for name in {sorted(DEFERRED)!r} if type(sys.modules.get(name)).__name__ == "_LazyModule"}}
print(*sorted(lazy))
import filelock, unittest.mock
filelock.FileLock, unittest.mock.Mock
import jax.numpy as jnp
print(int(jnp.arange(4).sum()))
"""


def output(script: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_what_is_deferred_is_loaded_when_it_is_used():
    assert output(_WHOLE) == [" ".join(sorted(DEFERRED)), "6"]


def test_a_plugin_of_jax_is_still_found(tmp_path: Path):
    facts, package = tmp_path / "jax_rocm7_plugin-1.0.dist-info", tmp_path / "jax_rocm7_plugin"
    for folder in (facts, package):
        folder.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-rocm7-plugin\nVersion: 1.0\n")
    (package / "__init__.py").touch()
    (package / "rocm_plugin_extension.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert output(_PLUGIN, PYTHONPATH=path) == ["jax_rocm7_plugin.rocm_plugin_extension"]
