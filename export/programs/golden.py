"""Golden answers: what a folder's programs answered where they were made. A device compares them at its first
start, so that a runtime or an accelerator that computes something else answers nobody."""

import dataclasses
import math
from typing import Any

from jaxllm.errors import JaxllmError, ProgramError
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.folder_format.parts import GoldenAnswer
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig

_TEXT = (
    "Once upon a time there was a small dog who lived beside a wide river. One day he met an old fox, and "
    "the fox asked him what he would do if he could cross the water."
)
_TOKENS = 8
# Another token is a tie, which rounding decides, if its log-probability is so near to that of the best.
_TIE_NATS, _NEAREST = 0.2, 5


def with_golden(manifest: Manifest, engine: Engine[Any]) -> Manifest:
    """The manifest of an engine's programs with an answer of each level.

    Raises:
      ProgramError: a level computes no finite numbers.
    """
    prompt = engine.tokenizer.encode(_TEXT)[: max(1, manifest.context_tokens - _TOKENS)]
    found = []
    for level in engine.model.levels:
        answer = _answer(engine, level, prompt, _TOKENS)
        found.append(GoldenAnswer(level=level, prompt=tuple(prompt), tokens=tuple(answer.tokens)))
    return dataclasses.replace(manifest, golden=tuple(found))


def require_golden(manifest: Manifest, engine: Engine[Any]) -> None:
    """Compares the answers of an engine with those of its manifest, up to the first tie.

    Raises:
      ProgramError: a level answers otherwise.
    """
    for golden in manifest.golden:
        answer = _answer(engine, golden.level, golden.prompt, len(golden.tokens))
        rows = zip(golden.tokens, answer.tokens, answer.logprobs, strict=True)
        for place, (wanted, found, best) in enumerate(rows, 1):
            if found == wanted:
                continue
            if best.logprob - dict(best.top).get(wanted, -math.inf) > _TIE_NATS:
                raise ProgramError(
                    f"level {golden.level} answers otherwise than where the programs were made: its token "
                    f"{place} is {found}, not {wanted}; use another version of the runtime, or export "
                    "the model again"
                )
            break


def _answer(engine: Engine[Any], level: int, prompt: Any, tokens: int) -> Any:
    config = GenerationConfig(max_tokens=tokens, ignore_eos=True, top_logprobs=_NEAREST)
    try:
        return engine.at(level).generate(list(prompt), config)
    except JaxllmError as error:
        raise ProgramError(f"level {level} answers nothing: {error}") from error
