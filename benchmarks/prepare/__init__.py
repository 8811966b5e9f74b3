"""`jaxllm bench prepare`: time and memory of preparing folders and GGUF files; speed, perplexity."""

PARTS = {
    "memory": "time and peak memory of preparing",
    "speed": "prefill and decode beside a bundle prepared from floats",
    "perplexity": "of GGUF files, beside llama.cpp's on the same file",
}
