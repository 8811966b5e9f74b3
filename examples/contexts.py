"""Keeps an app's context across restarts: what was said first is still there when the service opens again.

python examples/contexts.py
"""

import tempfile

from jaxllm import ContextOptions, LLMService


def open_service(folder: str) -> LLMService:
    """Opens the packaged model with contexts in a folder, at most 16 MiB of them in memory."""
    return LLMService.open(contexts=ContextOptions(folder=folder, budget_bytes=16 << 20))


with tempfile.TemporaryDirectory() as folder:
    service = open_service(folder)
    context = service.new_context("stories", level=70)  # of the app "stories", answered by a 70 % sub-model
    for piece in context.generate("Tell a story that begins with: Lily had a red ball.", max_tokens=60):
        print(piece, end="", flush=True)
    print()
    service.close()  # waits until all chunks are on storage

    service = open_service(folder)  # another process, days later
    context = service.context("stories", context.name)
    answer = context.generate("What was her name?", max_tokens=20).result()
    restored = answer.restoration
    chunks = f"{len(restored.read)} chunks read and {len(restored.computed)} computed"
    print(
        f"{answer.text}\n({chunks} in {restored.took_ms:.1f} ms; {len(context.tokens)} tokens in the context)"
    )
    context.delete()
    service.close()
