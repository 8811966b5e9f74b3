"""`jaxllm bench prefill`: the speed and the loss of integer prefill (mllm-NPU, arXiv 2407.05858).

`simulated_phone` and `run` order a prompt's subgraphs on a simulated phone, `speed` times prompts on one and
on two processors, `accuracy` compares our static steps with other `activation_quantizers`.
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "simulation": "orders of subgraphs on a simulated phone",
    "one-processor": "speed of prompts on all cores together",
    "two-processors": "the same on an integer and a float processor",
    "accuracy": "loss beside other quantizers of activations",
}
