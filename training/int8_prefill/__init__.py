"""Calibrates activation scales and shadow outliers of integer prefill (mllm-NPU).

Read `prefill`; the mathematics is `jaxllm.int8_prefill.fitting`. Run by `jaxllm calibrate prefill`. Measured
by `jaxllm bench prefill --only accuracy`.
"""
