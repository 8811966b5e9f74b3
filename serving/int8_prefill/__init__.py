"""Integer prefill on one processor or two (mllm-NPU): options, modes, prompts on real processors."""
