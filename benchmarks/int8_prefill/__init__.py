"""`jaxllm bench prefill`: the speed and the loss of integer prefill (mllm-NPU, arXiv 2407.05858).

`run` orders a prompt's subgraphs on the simulated phone of `models`, `speed` times prompts on one and on two
processors, `accuracy` compares our static steps with other `activation_quantizers`, and with fewer shadows
and other steps in layers without one.
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "simulation": "orders of subgraphs on a simulated phone",
    "one-processor": "speed of prompts on all cores together",
    "two-processors": "the same on an integer and a float processor",
    "accuracy": "loss beside other quantizers of activations",
    "pruning": "loss by how many layers have a shadow, and by what the others do",
}
