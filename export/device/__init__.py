"""The engine over exported programs on a device that has no JAX.

`python -m jaxllm.cli.device DIR` answers, chats, serves and profiles with a folder of programs that
`jaxllm export` wrote. What runs is the engine, the planner, the
store of contexts and the server of the live service: they import no JAX (a test blocks it). Here is what the
live service does with compiled steps: sampling (`host_sampling`) and chunks of contexts (`contexts`); and
what opens a folder (`opening`), answers in this process (`service`) or serves apps (`serving`).
"""
