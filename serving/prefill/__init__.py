"""Integer prefill on one processor or two (mllm-NPU): options, graphs, their schedule on real processors."""
