"""`jaxllm bench export`: exported programs beside the live engine that they were exported from."""
