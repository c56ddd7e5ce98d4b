"""Hooks of the documentation site: pages made from the sources, and links that leave the folder docs.

A link to a file of the repository outside of docs leads to a copy of that file in the site, under
`repository/`. A link to a folder becomes plain text, for a site has no folders to look into.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

from generated import api_page, cli_page, errors_page, mark_commands  # noqa: E402

FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[[^\]]*\])\(\s*([^)\s]+)\s*\)")
ABSOLUTE = re.compile(r"^([a-z][a-z0-9+.-]*:|#|/)", re.IGNORECASE)
GENERATED = {"reference/api.md": api_page, "reference/cli.md": cli_page, "reference/errors.md": errors_page}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages made from the sources, and copies of the files that pages link to."""
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make(ROOT / "src" / "offbeat")))
    todo = [file for file in files if file.is_documentation_page() and file.src_uri not in GENERATED]
    known = {file.src_uri for file in files}
    while todo:
        page = todo.pop()
        for target in _outside(_origin(page), page.content_string):
            name = f"repository/{target.relative_to(ROOT).as_posix()}"
            if name not in known and target.is_file():
                known.add(name)
                copy = File.generated(config, name, abs_src_path=str(target))
                files.append(copy)
                if copy.is_documentation_page():
                    copy.inclusion = _unlisted()
                    todo.append(copy)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links out of docs, and from copied files, at pages and copies in the site."""
    if page.file.src_uri in GENERATED:
        return markdown
    origin = _origin(page.file)

    def moved(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path, hash_, anchor = link.partition("#")
        if ABSOLUTE.match(link):
            return match[0]
        target = (origin.parent / path).resolve()
        name = _site_name(target)
        if files.get_file_from_path(name) is None:
            return text.lstrip("!")[1:-1] if target.exists() else match[0]
        return f"{text}({os.path.relpath(name, Path(page.file.src_uri).parent)}{hash_}{anchor})"

    markdown = mark_commands(markdown)
    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[at:])])


def _origin(file: Any) -> Path:
    """Return the path of a page's text in the repository."""
    return Path(file.abs_src_path) if file.abs_src_path else ROOT / "docs" / file.src_uri


def _outside(origin: Path, text: str) -> list[Path]:
    """Return the targets of a page's links that are not in docs."""
    links = [link.partition("#")[0] for _, link in LINK.findall(FENCE.sub("", text))]
    paths = [(origin.parent / link).resolve() for link in links if link and not ABSOLUTE.match(link)]
    return [path for path in paths if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs")]


def _site_name(target: Path) -> str:
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}" if target.is_relative_to(ROOT) else str(target)


def _unlisted() -> Any:
    """Return the mark of a page that is not in the navigation, on purpose."""
    from mkdocs.structure.files import InclusionLevel

    return InclusionLevel.NOT_IN_NAV
