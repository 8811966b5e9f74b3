"""Erases all contexts of an app, encrypted copies elsewhere included."""

from jaxllm.errors import ConfigError
from serving.contexts.manager import Contexts
from serving.contexts.root import folder_name, written


def erase(contexts: Contexts, app: str) -> None:
    """Deletes an app's contexts, and erases the key of those that are encrypted: copies of their files, in
    backups too, can be read by nobody.

    Raises:
      ConfigError: contexts are not encrypted, the app's name is not valid, or one is answering.
      CheckpointError: the device failed; the key is erased all the same, if that was possible.
    """
    vault = contexts.store.vault
    if vault is None:
        raise ConfigError("contexts are not encrypted; delete them one by one, or open with encryption")
    folder = folder_name(app)
    try:
        for record in contexts.store.records(app):
            contexts.delete(record.name)
    finally:
        with written(vault.folder):
            vault.erase(folder)
