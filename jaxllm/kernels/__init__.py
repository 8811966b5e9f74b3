"""How a product is computed; `jaxllm/linear.py` alone decides which of these runs."""
