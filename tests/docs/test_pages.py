"""Every code block of the documentation runs, or is marked as an excerpt.

The blocks of a page run in order in one folder, and Python blocks in one namespace, as a reader would run
them. See `pages` for the marks.
"""

from pathlib import Path

import pytest

from tests.docs.pages import RUN, SHOWN, Block, blocks_of, pages, text_of
from tests.docs.running_service import RunningService
from tests.docs.world import REAL, Missing, World, real_model

pytestmark = pytest.mark.usefixtures("kept_buckets")

RUNNABLE = [page for page in pages() if any(block.runs for block in blocks_of(page))]
CALLING = [page for page in pages() if any(block.calls for block in blocks_of(page))]
SLOW = [page for page in RUNNABLE if any(block.runs and "slow" in block.marks for block in blocks_of(page))]


def run_blocks(blocks: list[Block], folder: Path) -> None:
    """Runs blocks in order; skips at the end if some needed what is not here."""
    world, missing = World(folder), []
    try:
        for block in blocks:
            try:
                world.run(block)
            except Missing as what:
                missing.append(f"{block.place} needs {what}")
    finally:
        world.close()
    if missing:
        pytest.skip("; ".join(missing))


@pytest.mark.parametrize("page", RUNNABLE)
def test_quick_blocks_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page in SLOW and "not slow" not in request.config.option.markexpr:
        pytest.skip("all blocks of this page run in another test")
    run_blocks([block for block in blocks_of(page) if block.runs and "slow" not in block.marks], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", SLOW)
def test_all_blocks_run(page: str, tmp_path: Path) -> None:
    run_blocks([block for block in blocks_of(page) if block.runs], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("real", [False, True])
def test_blocks_call_a_service(real: bool, tmp_path: Path, documentation_cache: Path) -> None:
    """On pages that begin with the real model it answers, where it is here."""
    model = (real_model() if real else "") or "default"
    with RunningService(tmp_path, documentation_cache, model) as service:
        for page in [page for page in CALLING if (REAL in text_of(page)) == real]:
            service.turn_page()
            for block in filter(lambda block: block.calls, blocks_of(page)):
                service.run(block)


@pytest.mark.parametrize("page", pages())
def test_every_block_is_run_or_marked(page: str) -> None:
    for block in blocks_of(page):
        assert block.language in {*RUN, *SHOWN}, f"{block.place}: no test knows {block.language!r}"
        if "excerpt" in block.marks:
            assert block.marks["excerpt"], f"{block.place}: say why it is an excerpt"


def test_readme_fits_two_screens() -> None:
    assert len(text_of("README.md").splitlines()) <= 120
