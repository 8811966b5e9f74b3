"""Prints what a folder's loop and LiteRT-LM answer; for Pythons that have no more than they need, too.

device_answers.py loop FOLDER PATH       for each line of ids on standard input what `device_check` prints, by
                                         the modules at PATH, such as a loop.pyz
device_answers.py litert_lm FILE PATH    for each line of text greedy text; the runtime keeps files at PATH
"""

import json
import sys
from pathlib import Path

TOKENS = 8
TEXT = "It's 12 o'clock,  na\u00efve \u4f60\u597d\n\n\U0001f600 \ufffd"


def loop_answers(folder, lines):
    """The tokens of each line of ids, greedy, drafted and drawn, two that follow, and those of a text."""
    from jaxllm.export.device.opening import open_device
    from jaxllm.sampling_state import Sampling
    from jaxllm.serving.engine.request import GenerationConfig

    loop, said = open_device(Path(folder), threads=1), []
    for prompt in lines:
        tokens = {}
        for kind, temperature in (("greedy", 0), ("drafted", 0), ("drawn", 1)):
            drawn = Sampling(temperature=temperature, seed=3)
            config = GenerationConfig(max_tokens=TOKENS, ignore_eos=True, sampling=drawn)
            tokens[kind] = loop.generate(prompt, config).tokens
        # One that continues is given its prompt again.
        config = GenerationConfig(max_tokens=2, ignore_eos=True, sampling=drawn)
        tokens["continued"] = loop.generate([*prompt, *tokens["drawn"], *prompt], config).tokens
        said += [" ".join(map(str, [kind, *ids])) for kind, ids in tokens.items()]
    return [*said, " ".join(map(str, ["encoded", *loop.tokenizer.encode(TEXT, special=False)]))]


def runtime_answers(file, cache, texts):
    """The greedy text after each text, as JSON."""
    import litert_lm

    litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
    engine = litert_lm.Engine(
        file, backend=litert_lm.Backend.CPU(thread_count=1), max_num_tokens=64, cache_dir=cache
    )
    said = []
    for text in texts:
        session = engine.create_session(
            sampler_config=litert_lm.SamplerConfig(top_k=1, temperature=0.0, seed=1),
            apply_prompt_template=False,
            max_output_tokens=TOKENS,
        )
        session.run_prefill([text])
        said.append(json.dumps(session.run_decode().texts[0]))
    return said


if __name__ == "__main__":
    kind, what, path = sys.argv[1:]
    given = sys.stdin.read().splitlines()
    if kind == "loop":
        sys.path.insert(0, path)
        found = loop_answers(what, [[*map(int, line.split())] for line in given])
    else:
        found = runtime_answers(what, path, given)
    print("\n".join(found))
