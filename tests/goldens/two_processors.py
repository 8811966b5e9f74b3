"""Reads prompts on two processors, in a process whose JAX was prepared for them; prints the answers."""

import json
import sys
from pathlib import Path

from jaxllm.serving.int8_prefill.processors import prepare_processors

prepare_processors()

from tests.goldens import opening  # noqa: E402
from tests.goldens.cases import prefilled  # noqa: E402


def main(path: str) -> None:
    """Prints the answers of one bundle."""
    engine = opening.open_engine(Path(path), prefill="two")
    answers = prefilled(engine)
    engine.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
