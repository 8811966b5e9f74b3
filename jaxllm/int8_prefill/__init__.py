"""Integer prefill (mllm-NPU, arXiv 2407.05858): shadow outliers, chunk-sharing subgraphs, their schedule."""
