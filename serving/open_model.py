"""Defines what an engine needs of an open model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.text.tokenizer import Tokenizer
from serving.host.progress import Progress
from serving.runners.runner import Runner

if TYPE_CHECKING:
    from serving.images.encoder import ImageEncoder
    from serving.speculation.speculation import Speculation


class Model(Protocol):
    """An open model, with a runner for each of its levels."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def tokenizer(self) -> Tokenizer: ...  # noqa: D102

    @property
    def levels(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def images(self) -> "ImageEncoder | None": ...  # noqa: D102

    def runner(self, level: int, /) -> Runner: ...  # noqa: D102

    def warm_up(  # noqa: D102
        self,
        level: int,
        speculation: "Speculation | None",
        *,
        prompt_tokens: int | None,
        max_tokens: int,
        progress: Progress | None,
    ) -> None: ...

    def facts(self) -> dict[str, Any]: ...  # noqa: D102

    def set_adapter(self, folder: str | Path | None, /) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102
