"""Text that every Python installation has: its own language reference."""

from jaxllm.errors import ConfigError


def builtin_texts() -> list[str]:
    """Returns Python's own language reference, one text per topic; it needs no download.

    It differs slightly between Python versions.

    Raises:
      ConfigError: this Python was installed without its documentation.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError("this Python has no pydoc_data to read; give text files with --text") from error
    return [text.strip() for _, text in sorted(topics.items()) if text.strip()]
