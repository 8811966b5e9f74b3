"""Kept verdicts about tokenizers: asked for once per text, never trusted from others, never needed."""

from pathlib import Path

import pytest

from jaxllm.serving.ground import bundles
from jaxllm.serving.ground.bundles import open_tokenizer
from jaxllm.text import tokenizer, tokenizer_bounds
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles
from tests.tiny import tiny_tokenizer


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizerFiles:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundles, "_MIN_TEXT_BYTES", 0)
    return tiny_tokenizer()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are checked."""
    asked: list[str] = []
    check = tokenizer_bounds.is_ordinary

    def counting(text: str) -> bool:
        asked.append(text)
        return check(text)

    for module in (tokenizer, tokenizer_bounds):
        monkeypatch.setattr(module, "is_ordinary", counting)
    return asked


def _kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "tokenizers").iterdir())


def test_a_text_is_checked_once(files, checks, tmp_path, monkeypatch):
    first, again = open_tokenizer(files), open_tokenizer(files)
    assert len(checks) == 1
    assert again.same_tokens(first)
    assert [path.read_bytes() for path in _kept(tmp_path)] == [b"ordinary"]
    # Other code has other verdicts.
    changed = tmp_path / "bounds.py"
    changed.write_text("# Another check.\n")
    monkeypatch.setattr(tokenizer_bounds, "__file__", str(changed))
    open_tokenizer(files)
    assert len(checks) == 2


@pytest.mark.parametrize("harm", ["mode", "content", "link"])
def test_what_others_may_have_written_is_not_trusted(harm, files, checks, tmp_path):
    open_tokenizer(files)
    (path,) = _kept(tmp_path)
    if harm == "mode":
        path.chmod(0o666)
    elif harm == "content":
        path.write_bytes(b"ordinaryordinaryordinary")
    else:
        path.unlink()
        path.symlink_to("/dev/zero")
    open_tokenizer(files)
    assert len(checks) == 2


def test_where_nothing_is_kept(files, tmp_path, monkeypatch):
    """The cache is a file; or the text is small."""
    (tmp_path / "cache").write_text("")
    assert open_tokenizer(files).same_tokens(Tokenizer(files))
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(bundles, "_MIN_TEXT_BYTES", 1 << 20)
    open_tokenizer(files)
    assert not (tmp_path / "cache").exists()
