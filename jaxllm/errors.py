"""Errors that jaxllm raises on purpose, for callers to handle.

Every message has the problem, the offending value, the allowed values and the remedy. The command line
prints the message on one line and exits with 1.
"""


class JaxllmError(Exception):
    """Base of all errors raised on purpose by this project."""


class ConfigError(JaxllmError, ValueError):
    """A configuration or request value is out of its domain."""


class CheckpointError(JaxllmError):
    """A model folder or its files are missing, malformed or disagree with each other."""


class Unreadable(CheckpointError):
    """A file could not be read, because storage failed or a newer version wrote it. It may be intact, so it
    is neither moved nor removed."""


class BundleError(CheckpointError):
    """A prepared bundle is truncated, corrupt, of another version, or not a bundle at all."""


class ProgramError(CheckpointError):
    """An exported program is incomplete, corrupt, of another version, or does not belong to the given
    weights."""


class ContextGone(JaxllmError):
    """A stored context cannot be used: it was deleted, its key was erased, its adapter is not loaded, or its
    tokens are of another model's tokenizer."""


class BudgetExceeded(JaxllmError):
    """A request does not fit the memory or storage budget."""


class BucketMissing(JaxllmError):
    """A bucket is not in the bucket table (nothing compiles after warm-up)."""


class ContextOverflow(JaxllmError):
    """A prompt does not fit the model's window or the engine's cache."""


class NotFinite(JaxllmError):
    """A model's logits are infinite or NaN, so that no token can be chosen."""


class TemplateError(JaxllmError):
    """The model's chat template refuses the messages, or is broken."""


class ObjectiveMissed(JaxllmError):
    """No sub-model meets a request's latency objective, and the request insists on it."""


def one_line(reason: object) -> str:
    """Another library's error message on one line of at most 300 characters, to quote in ours."""
    return " ".join(str(reason).split())[:300] or type(reason).__name__
