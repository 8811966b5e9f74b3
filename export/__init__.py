"""Portable programs of the compiled steps, for devices that do not run JAX.

Empty so far: the package fixes the room's place and its import direction (`export` -> `jaxllm`).
"""
