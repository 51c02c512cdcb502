"""The Markdown pages of the repository, for tests that read them."""

from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Folders of build outputs and installed packages.
_FOREIGN = {"build", "dist", "node_modules", "target", "__pycache__"}


def markdown_pages() -> list[Path]:
    """Return all Markdown files, sorted, except those in hidden folders, build outputs and
    installed packages.
    """
    return sorted(_pages(REPOSITORY))


def page_id(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def _pages(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_symlink() or path.name.startswith(".") or path.name in _FOREIGN:
            continue
        if path.is_dir():
            yield from _pages(path)
        elif path.suffix == ".md":
            yield path
