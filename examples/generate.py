"""Generates text with the packaged model: as a stream, and drawn with a seed.

python examples/generate.py
"""

from jaxllm import Engine, GenerationConfig, Sampling

engine = Engine.open()  # or Engine.open("model.jaxllm"), a Hugging Face folder or a GGUF file

for piece in engine.stream("Once upon a time", GenerationConfig(max_tokens=40)):
    print(piece, end="", flush=True)
print()

config = GenerationConfig(max_tokens=40, stop=("\n",), sampling=Sampling(temperature=0.8, top_p=0.95, seed=7))
answer = engine.generate("The little dog", config)
print(answer.text, f"({answer.finish_reason}, first token after {answer.timings.ttft_ms:.1f} ms)")
