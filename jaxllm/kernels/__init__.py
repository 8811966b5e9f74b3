"""Kernels of products and attention: native ones and XLA's. `jaxllm/nn/linear.py` chooses among those of
products."""
