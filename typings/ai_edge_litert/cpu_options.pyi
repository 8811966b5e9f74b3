from typing import Any

# Optional and not installed where types are checked.
def __getattr__(name: str) -> Any: ...
