"""`jaxllm bench export`: exported programs beside the live engine that they were exported from."""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "formats": "every format beside the live engine",
    "sampling": "TFLite programs that draw several tokens per dispatch beside a dispatch for each token",
    "shadow": "prefill of W8A8 with shadow beside other 8-bit programs and llama.cpp",
    "stages": "stages of W8A8 prefill on two processors, in each order, beside the simulator",
}
