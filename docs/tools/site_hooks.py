"""mkdocs hooks that add files outside docs/ to the site.

Pages of docs/ and the READMEs of the folders link to each other and to files by relative paths
within the repository. These hooks add every linked file outside docs/ to the site, below
`repository/` (Markdown as a page, other files unchanged), and rewrite the links. Mermaid diagrams,
which GitHub renders in the browser, are replaced by pictures.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeAlias, cast

from markdown_source import INLINE_CODE, blocks, links, prose_lines, replace_links

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

# Type of the navigation in mkdocs.yml.
Nav: TypeAlias = "str | list[Nav] | dict[str, Nav]"

REPOSITORY = Path(__file__).resolve().parents[2]
BELOW = "repository"
_ITEM = re.compile(r"[-*] \S")
# File -> the picture that replaces its diagram.
PICTURES = {
    "scheduler/README.md": "docs/pictures/states.svg",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the files of docs/decisions to the navigation, one entry each; return `config`."""
    for part in _parts(_nav(config)):
        if "Decisions" in part:
            pages = sorted((REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"))
            part["Decisions"] = [
                {"Overview": "decisions/index.md"},
                *(page.relative_to(REPOSITORY / "docs").as_posix() for page in pages),
            ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that are in the navigation, or that a page or another added file
    links to; return `files`.
    """
    # Imported here: the tests of links run without mkdocs.
    from mkdocs.structure.files import File

    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    # Files in the navigation that no page links to.
    waiting += [_in_repository(place) for place in _places(_nav(config)) if _is_below(place)]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (REPOSITORY / path).is_file():
            # Skip missing files: mkdocs reports the page that links to them.
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(
                File.generated(config, site_path(path), abs_src_path=str(REPOSITORY / path))
            )
        if path.endswith(".md"):
            text = (REPOSITORY / path).read_text(encoding="utf-8")
            targets = (linked_file(path, link.target) for link in links(text))
            waiting += [target for target in targets if target is not None]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page's Markdown for the site: diagrams replaced by pictures, GitHub's Markdown
    adapted, links rewritten to paths on the site.
    """
    del config, files
    place = page.file.src_uri
    path = _in_repository(place) if _is_below(place) else f"docs/{place}"
    return for_site(path, adapt_github_markdown(with_pictures(path, markdown)))


def for_site(path: str, markdown: str) -> str:
    """Return the Markdown of the file `path` with its links rewritten for the site."""
    here = posixpath.dirname(site_path(path))

    def target_of(target: str) -> str | None:
        if _is_elsewhere(target):
            return target
        file = linked_file(path, target)
        if file is None:
            # A folder without a README has no page on the site.
            return None
        relative = posixpath.relpath(site_path(file), here or ".")
        _, hash_mark, anchor = target.partition("#")
        return f"{relative}{hash_mark}{anchor}"

    return replace_links(markdown, target_of)


def with_pictures(path: str, markdown: str) -> str:
    """Return the Markdown of file `path` with each Mermaid diagram replaced by a picture. Raises
    ValueError for a diagram in a file that is not in `PICTURES`.
    """
    for block in blocks(markdown):
        if block.language == "mermaid":
            if path not in PICTURES:
                raise ValueError(f"{path}, line {block.line}: a diagram without a picture")
            picture = posixpath.relpath(PICTURES[path], posixpath.dirname(path) or ".")
            fenced = f"```{block.info}\n{block.text}```"
            markdown = markdown.replace(fenced, f"![]({picture})")
    return markdown


def adapt_github_markdown(markdown: str) -> str:
    """Return the Markdown with the syntax that only GitHub accepts rewritten for the site.

    On GitHub a list may follow a paragraph without an empty line. Code in a table's cell writes a
    pipe as `\\|`, which the site would show with its backslash. A fence may have more than a
    language: "sh test" marks a block that the tests run.
    """
    lines = markdown.splitlines()
    prose = prose_lines(markdown)
    apart: list[str] = []
    for number, line in enumerate(lines):
        before = prose[number - 1] if number else ""
        if _ITEM.match(prose[number]) and before and not _in_list(before):
            apart.append("")
        if prose[number].startswith("|"):
            line = INLINE_CODE.sub(lambda code: code.group().replace("\\|", "|"), line)
        apart.append(line)
    text = "\n".join(apart)
    for block in blocks(text):
        if block.info != block.language:
            fenced = f"```{block.info}\n{block.text}"
            text = text.replace(fenced, f"```{block.language}\n{block.text}")
    return text


def linked_file(path: str, target: str) -> str | None:
    """Return the target of a link in the file `path`, relative to the root of the repository; for a
    folder, its README.

    None if the folder has no README, or if the link leads out of the repository or to the page
    itself.
    """
    name = target.partition("#")[0]
    if _is_elsewhere(target) or not name:
        return None
    file = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    if file.startswith(".."):
        return None
    if (REPOSITORY / file).is_dir():
        file = posixpath.normpath(posixpath.join(file, "README.md"))
        return file if (REPOSITORY / file).is_file() else None
    return file


def site_path(path: str) -> str:
    """Return the path, in the site's sources, of a file of the repository."""
    parts = PurePosixPath(path).parts
    return posixpath.join(*parts[1:]) if parts[0] == "docs" else posixpath.join(BELOW, *parts)


def _in_list(line: str) -> bool:
    return line.startswith(" ") or _ITEM.match(line) is not None


def _in_repository(place: str) -> str:
    return place.removeprefix(f"{BELOW}/")


def _is_below(place: str) -> bool:
    return place.startswith(f"{BELOW}/")


def _is_elsewhere(target: str) -> bool:
    return "://" in target or target.startswith(("#", "mailto:"))


def _nav(config: MkDocsConfig) -> Nav:
    return cast("Nav", config["nav"] or [])


def _parts(nav: Nav) -> list[dict[str, Nav]]:
    if isinstance(nav, dict):
        return [nav, *(part for value in nav.values() for part in _parts(value))]
    if isinstance(nav, list):
        return [part for value in nav for part in _parts(value)]
    return []


def _places(nav: Nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [place for part in parts for place in _places(part)]
