"""Runs integer prefill on one processor or two (mllm-NPU, arXiv 2407.05858): options, modes, scheduling."""
