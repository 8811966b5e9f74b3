"""Runs the engine over exported programs on a device without JAX.

`python -m jaxllm.cli.device DIR` answers, chats, serves and profiles with a folder of `jaxllm export`. It
runs the engine, the planner, the store of contexts and the server of the live service, which import no JAX
(a test blocks it). This package replaces what the live service does with compiled steps: sampling
(`host_sampling`) and chunks of contexts (`contexts`); and it opens a folder (`opening`), answers in this
process (`service`) or serves apps (`serving`).
"""
