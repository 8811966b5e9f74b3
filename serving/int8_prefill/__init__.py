"""Integer prefill (mllm-NPU, arXiv 2407.05858) at run time, on one processor or two.

Promise: a calibrated prompt is prefilled in integers if that is faster, or never in part. Read first:
`modes` (integers or floats), `runner` (chunks through the stages), `processor_pair` (out of order on two).
Plugged in by `jaxllm.serving.opening`. Measured by `jaxllm bench prefill`.
"""
