"""One compiler of grammars for all tests of calls: making it is what costs."""

import pytest

from jaxllm.serving.guided.compiler import GrammarCompiler
from jaxllm.text.tokenizer import Tokenizer
from tests.tiny import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)
