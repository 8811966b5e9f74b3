"""`jaxllm bench engine`: load, build and run times of the engine beside other engines on the same weights."""
