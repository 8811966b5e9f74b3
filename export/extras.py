"""Checks that packages that only exports need are installed."""

import importlib.util

from jaxllm.errors import ConfigError

# Format -> the extra that it needs, and the modules of that extra.
_NEEDS = {
    "stablehlo": ("stablehlo", ("flatbuffers",)),
    "tflite": ("export", ("flatbuffers", "litert_converter", "ai_edge_litert")),
    "device": ("export", ("flatbuffers", "litert_converter", "ai_edge_litert")),
    "litertlm": (
        "export",
        ("flatbuffers", "litert_converter", "ai_edge_litert", "litert_lm_builder", "litert_lm"),
    ),
    "hf": ("export", ()),
    "gguf": ("gguf", ("gguf",)),
}


def require_format(kind: str) -> None:
    """Checks that the packages of a format are installed.

    Raises:
      ConfigError: one is not; the message has the command that installs it.
    """
    extra, modules = _NEEDS[kind]
    require_extra(extra, *modules)


def require_extra(extra: str, *modules: str) -> None:
    """Checks that the packages of an extra are installed.

    Raises:
      ConfigError: one is not; the message has the command that installs it.
    """
    missing = [name for name in modules if not _found(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run "
            f"`pip install 'jaxllm[{extra}]'`, in a virtual environment of its own, for packages of other "
            "extras may exclude it"
        )


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The package around it is missing.
        return False
