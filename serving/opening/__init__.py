"""Opens models: the one room that knows all five systems and plugs them into the engine.

Promise: weights are placed where the memory budget allows, with the runner that fits. Read: `engine`
(`Engine.open`), `loading` (a bundle to a loaded model), `make_runners`, `weight_source`. Measured by
`jaxllm bench engine` and `jaxllm bench speculative`.
"""
