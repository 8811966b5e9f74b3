"""The errors that callers of jaxllm can expect, and act on.

Every message says what was wrong, the offending value, what is allowed and what to do. The command
line prints the message on one line and exits with 1.
"""


class JaxllmError(Exception):
    """Base of all errors raised on purpose by this project."""


class ConfigError(JaxllmError, ValueError):
    """A configuration or request value is out of its domain."""


class CheckpointError(JaxllmError):
    """A model folder or its files are missing, malformed or disagree with each other."""


class Unreadable(CheckpointError):
    """A file's content is unknown, because storage refused to give it or a newer version wrote it: it may be
    whole, so that nothing of it is moved or removed."""


class BundleError(CheckpointError):
    """A prepared bundle is truncated, corrupt, of another version, or not a bundle at all."""


class ProgramError(CheckpointError):
    """An exported program is incomplete, corrupt, of another version, or of other weights than are there."""


class ContextGone(JaxllmError):
    """What a context held is no longer of use: its model changed, or its data is lost."""


class BudgetExceeded(JaxllmError):
    """What was asked for does not fit the memory or storage that there is for it."""


class BucketMissing(JaxllmError):
    """A graph was asked for that the bucket table does not hold (nothing compiles after warm-up)."""


class ContextOverflow(JaxllmError):
    """A prompt does not fit the model's window or the engine's cache."""


class NotFinite(JaxllmError):
    """A model's numbers overflowed or are no numbers, so that no token can be chosen by them."""


class TemplateError(JaxllmError):
    """The model's chat template refuses the messages, or is broken."""


class ObjectiveMissed(JaxllmError):
    """No sub-model meets a request's latency objective, and the request insists on it."""


def one_line(reason: object) -> str:
    """Another library's message as part of ours: one line of at most 300 characters."""
    return " ".join(str(reason).split())[:300] or type(reason).__name__
