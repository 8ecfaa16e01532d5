# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: adds the generated pages, draws pictures into pages, and refuses whatever would use the network."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import commands
import pages
import settings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

SVG = re.compile(r'<img alt="([^"]*)" src="([^"]*\.svg)"[^>]*/?>')
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
CELL = re.compile(r"<td[^>]*>(.*?)</td>", re.DOTALL)
WORDS = 40  # characters of a cell, on average
# Code in a line, and blocks of commands: a line never breaks after the two hyphens of a flag.
FLAG_IN_CODE = re.compile(r"<code>[^<]*--\w[^<]*</code>|<div class=\"language-sh highlight\">.*?</div>", re.DOTALL)
LOADING = r'<(?:script|img|iframe|link rel="?(?:stylesheet|preload|icon)"?)'
LOADED = re.compile(LOADING + r"""[^>]*?(?:src|href)="?((?:https?:)?//[^"'> ]+)""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of a folder where the navigation says FOLDER/*."""
    places: dict[str, list[Any]] = {
        "reference/commands/*": [{each.name: f"reference/commands/{each.name}.md"} for each in commands.commands()],
        "decisions/*": [{title: path} for path, title in pages.decisions().items()],
    }
    config.nav = _expanded(config.nav, places)
    return config


def _expanded(nav: Any, places: dict[str, list[Any]]) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(below, places) for title, below in nav.items()}
    if isinstance(nav, list):
        there = [places.get(item) or [item] if isinstance(item, str) else [_expanded(item, places)] for item in nav]
        return [item for items in there for item in items]
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and a page for every file outside docs/ that a page links to."""
    made: dict[str, str | bytes] = {
        **settings.pages(),
        **commands.pages(),
        **pages.notebooks(config.repo_url),
        "reference/modules.md": pages.modules(),
        "reference/recipes.md": pages.recipes(),
        "reference/api.md": pages.api(),
        "decisions/index.md": pages.decisions_page(),
        "changelog.md": pages.changelog(),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    if not config.repo_url:
        linked = {
            source
            for file in files.documentation_pages()
            for target, _ in pages.LINK.findall(file.content_string)
            if (source := pages.source_of(file.src_uri, target))
        }
        for source in sorted(linked):
            page = File.generated(config, f"source/{source}.md", content=pages.source_page(source))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to its address, or to the pages that show them."""

    def replaced(match: re.Match) -> str:
        source = pages.source_of(page.file.src_uri, match[1])
        if not source:
            return match[0]
        if config.repo_url:
            return f"{config.repo_url.rstrip('/')}/blob/main/{source}{match[2]}"
        up = "../" * page.file.src_uri.count("/")
        return f"{up}source/{source}.md"

    return pages.LINK.sub(replaced, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draws SVG pictures into the page, where they have its colours, and marks what a style sheet cannot find."""

    def drawn(match: re.Match) -> str:
        path = Path(page.file.abs_src_path or "").parent / Path(match[2]).name
        svg = path.read_text("utf-8")
        return f'<div class="drawing" role="img" aria-label="{match[1]}">{svg[svg.index("<svg") :]}</div>'

    html = TABLE.sub(_marked, SVG.sub(drawn, html))
    return FLAG_IN_CODE.sub(lambda match: re.sub(r"(?<![\w-])--\w+", r"<span class=flag>\g<0></span>", match[0]), html)


def _marked(match: re.Match) -> str:
    """Returns a table, marked if its cells hold sentences: such a table scrolls where there is no room for them."""
    cells = [re.sub(r"<[^>]+>", "", cell) for cell in CELL.findall(match[0])]
    words = len(cells) > 0 and sum(map(len, cells)) / len(cells) > WORDS
    return match[0].replace("<table>", "<table data-words>", 1) if words else match[0]


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the index of the search as a script, which a page that is opened as a file can load.

    Raises: PluginError if a page loads anything from another place than the site itself.
    """
    index = Path(config.site_dir, "search", "search_index.json")
    if index.exists():
        index.with_suffix(".js").write_text(f"var __index = {index.read_text('utf-8')}", encoding="utf-8")
    for path in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(path.read_text("utf-8")):
            raise PluginError(f"{path}: loads {found[1]}, and the site must work without a network")
