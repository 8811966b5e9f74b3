"""Answers of every family of llama.cpp's collection of templates (`make test-foreign`): rendered, cut at
every character, read; forced calls; and the table of the docs."""

from pathlib import Path

import numpy as np
import pytest

from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.guided.calls import answer_grammar
from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.text.answer_syntax import written
from jaxllm.text.tokenizer import Tokenizer
from tests.text import answer_templates as own
from tests.text.foreign_templates import TABLE, collection, table
from tests.tiny import VOCAB_SIZE, tiny_tokenizer

FILES = collection()
if not FILES:
    pytest.skip("needs the collection: make test-foreign", allow_module_level=True)

# Answers that a template writes into the history in another way than its model writes them: a text before a
# call becomes a thought, a message of its own, or comes after it; a prompt is not the beginning of the turn.
OTHERWISE = {
    ("NVIDIA-Nemotron-Nano-v2", "text"), ("NVIDIA-Nemotron-Nano-v2", "text and call"),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "text and call"),
    ("llama-cpp-deepseek-r1", "text and call"), ("openai-gpt-oss-120b", "text and call"),
    ("google-gemma-4-31B-it", "text and call"), ("google-gemma-4-31B-it-interleaved", "text and call"),
}  # fmt: skip
TURNS = ("CohereForAI-c4ai-command-r-plus-tool_use", "CohereForAI-c4ai-command-r7b-12-2024-tool_use")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_answers_come_back_as_they_were_rendered(path: Path) -> None:
    template = own.template_of(path.read_text(encoding="utf-8"))
    found, shown = template.answer_format, set()
    for label, text, thought, calls in own.ANSWERS:
        if (len(calls) > 1 and not found.several) or (path.stem, label) in OTHERWISE:
            continue
        answer = own.answer_text(template, own.message_of(text, thought, calls))
        if answer is None:
            continue
        bare = not (found.syntax.section[0] + found.syntax.opening).strip()
        if text and calls and bare:
            continue
        shown.add(label)
        expected = (thought, text, [(tool, values, True) for tool, values in calls])
        for size in (1, 7, 10_000):
            part = own.scanned(found, answer[0], size, thinking=answer[1])
            if path.stem in TURNS:
                assert part[2] == expected[2], (label, size, answer)
            else:
                assert (part[0], part[1].strip(), part[2]) == expected, (label, size, answer)
    assert "call" in shown


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_forced_calls_follow_the_grammar(path: Path, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    found = own.template_of(path.read_text(encoding="utf-8")).answer_format
    stops = GenerationConfig().stop_ids(tokenizer.eos_ids)
    forced = answer_grammar(found, own.TOOLS, required=True, several=True)
    strict = answer_grammar(found, own.TOOLS, required=False, several=True, strict=["get_weather"])
    assert forced is not None
    assert strict is not None
    calls = [("get_weather", own.SIMPLE), ("find.all-2", {"city": "17"})]
    functions = [{"name": tool, "arguments": values} for tool, values in calls]
    text = written(found, functions if found.several else functions[:1]).removeprefix(found.primed)
    for grammar in (forced, strict):
        matcher = compiler.matcher(grammar, stops)
        for token in tokenizer.encode(text, add_special_tokens=False, special=False):
            assert matcher.allowed()[token], (text, token)
            matcher.take([token])
        assert matcher.complete or matcher.allowed()[tokenizer.eos_ids[0]]
    assert np.flatnonzero(compiler.matcher(forced, stops).allowed()).size


def test_the_table_of_the_docs_is_this() -> None:
    assert TABLE.read() == table()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)
