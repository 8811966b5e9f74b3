"""Integer prefill (mllm-NPU, arXiv 2407.05858), the pure part: W8A8 with shadow outliers.

Promise: a prompt in 8-bit integers with static activation scales, at a loss below 1 %. Read first: `shadow`
(products and their outliers), `calibration` and `fitting` (the scales), `subgraphs` (the stages of a layer),
`schedule` (their order on two processors, and its simulator). Plugged in by `jaxllm.serving.int8_prefill`.
Measured by `jaxllm bench prefill`.
"""
