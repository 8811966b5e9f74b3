"""Compiles quickly: most tests run a program once or twice, and compiling it is most of their time."""

import functools

import jax

# Code that is as right, made in two thirds of the time and slower to run. No option that names a part of one
# compiler: the next version refuses it.
QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)
