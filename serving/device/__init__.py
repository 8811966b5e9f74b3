"""The engine over exported programs on a device that has no JAX.

`python -m serving.device DIR` answers, chats, serves and profiles with a folder of programs that
`jaxllm export` wrote (those of IREE with `--machine-code`). What runs is the engine, the planner and the
store of contexts of the live service: they import no JAX (a test blocks it). Here is what the live service
does with compiled steps otherwise: draws of tokens (`host_sampling`) and the chunks of contexts (`contexts`).
"""
