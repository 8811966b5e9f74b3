"""Serves with the names of models that foreign tests ask for: python -m tests.foreign.bridged_service FILE"""

import sys
from typing import Any

from jaxllm.cli.main import main
from jaxllm.serving.server.api.requests import ApiState

_own = ApiState.model


def model(state: ApiState, name: str | None, **how: Any) -> Any:
    """Any name but those that stand for no model."""
    missing = any(word in (name or "").lower() for word in ("invalid", "exist", "unknown", "wrong"))
    return _own(state, name if missing else None, **how)


# Child processes of the service import this module, too.
if __name__ == "__main__":
    ApiState.model = model  # type: ignore[method-assign]
    main(["serve", "--config", sys.argv[1]])
