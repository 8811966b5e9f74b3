"""A generated table in a page of the documentation, between two comments."""

import dataclasses
import re
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PageTable:
    """The table between `<!-- name -->` and `<!-- end of name -->` of a page."""

    page: Path
    name: str

    def read(self) -> str:
        """The table."""
        return self._split()[1]

    def write(self, table: str) -> None:
        """Replaces it."""
        before, _, after = self._split()
        self.page.write_text(before + table + after, encoding="utf-8")

    def _split(self) -> list[str]:
        start, end = f"<!-- {self.name} -->\n", f"<!-- end of {self.name} -->"
        parts = re.split(
            f"(?<={start})(.*?)(?={end})", self.page.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        assert len(parts) == 3, f"{self.page} has no marks of the table {self.name}"
        return parts
