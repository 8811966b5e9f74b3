"""Sets JAX as a host program does: the packaged model computes the same, or refuses it by name."""

import os
import subprocess
import sys

import jax
import pytest

from jaxllm.errors import ConfigError
from jaxllm.host_settings import own_jax_settings, require_usable_jax

# Sampling and penalties, and prefill in integers, under a host's settings and without.
PROGRAM = """
import jax
from jaxllm import Engine, EngineOptions, GenerationConfig, PrefillOptions, Sampling

NAMES = {"jax_enable_x64": (True, False), "jax_numpy_rank_promotion": ("raise", "allow"),
         "jax_numpy_dtype_promotion": ("strict", "standard")}
SAMPLING = Sampling(temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3)
texts = []
for when in (0, 1):
    for name, values in NAMES.items():
        jax.config.update(name, values[when])
    options = EngineOptions(context_tokens=128, prefill=PrefillOptions(mode="int8"))
    engine = Engine.open("default", options=options)
    asked = GenerationConfig(max_tokens=12, sampling=SAMPLING)
    texts.append("".join(engine.stream("Once upon a time", asked)))
    assert jax.config.jax_enable_x64 == (not when)
    engine.close()
assert texts[0] and texts[0] == texts[1], texts
"""


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_packaged_model_answers_the_same_under_a_hosts_settings():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr


def test_settings_of_the_host_are_kept_out_and_left_alone():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):

        @own_jax_settings()
        def inside():
            return jax.numpy.arange(3).dtype, (jax.numpy.zeros((2, 3)) + jax.numpy.zeros(3)).dtype

        assert [each.name for each in inside()] == ["int32", "float32"]
        assert jax.numpy.arange(3).dtype == "int64"


def test_immediate_execution_is_refused_by_name():
    with jax.disable_jit(), pytest.raises(ConfigError, match="jax_disable_jit is set"):
        require_usable_jax()


def test_a_platform_without_a_device_is_refused_by_name():
    done = run("import jaxllm; jaxllm.Engine.open('draft')", JAX_PLATFORMS="cuda")
    assert "ConfigError: JAX finds no device of JAX_PLATFORMS=cuda" in done.stderr
