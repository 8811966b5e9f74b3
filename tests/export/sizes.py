"""The tiny model that is exported, and what it is asked, for tests where JAX is not installed, too."""

import dataclasses

from jaxllm.serving.engine.request import GenerationConfig
from tests.tiny_config import TINY

# Widths at which the runtimes' weight caches tell matrices apart, and tests stay quick.
CFG = dataclasses.replace(TINY, heads=8, kv_heads=4)
CONTEXT = 64
CHUNKS = (16,)
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPTS = [
    [1],
    [1, 50, 7, 99, 23],
    [(7 * i) % CFG.vocab_size for i in range(17)],
    # Its answer outgrows caches of 32.
    [(5 * i) % CFG.vocab_size for i in range(25)],
    [(11 * i) % CFG.vocab_size for i in range(52)],
]
# The weights of a folder: apart from StableHLO programs, within TFLite ones.
WEIGHTS_FILES = ("weights.safetensors", "model.tflite")


def weights_file(manifest):
    """Name of the file with the weights."""
    (name,) = (each for each in manifest.files if each in WEIGHTS_FILES)
    return name


def answers(engine):
    """The greedy tokens of all prompts."""
    return [engine.generate(prompt, CONFIG).tokens for prompt in PROMPTS]
