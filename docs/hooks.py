"""mkdocs hook: fills in the generated parts of the pages, and lets pages link to files outside docs/.

A page holds between `<!-- generated: families -->` and `<!-- end -->` the text of `families()` in generated.py. The
site doesn't take it from the page: it calls the function again. A link that leaves docs/, such as
`../benchmarks/cache-methods.png`, works in the repository as it is; in the site an image is copied, and any other file
is linked where the repository is hosted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import generated
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/retrofox/retrofox/blob/main"
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)((?:#[^)\s]*)?)\)")
IMAGES = (".png", ".svg")


def on_files(files: Any, config: Any) -> Any:
    """Adds every image that a page shows from outside docs/."""
    found = {path for page in files.documentation_pages() for path, _ in OUTSIDE.findall(page.content_string)}
    for path in sorted(path for path in found if path.endswith(IMAGES)):
        files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in generated parts and turns links that leave docs/ into ones that work in the site."""
    return OUTSIDE.sub(_linked, generated.fill_in(markdown))


def _linked(link: re.Match[str]) -> str:
    path, anchor = link.groups()
    if not (ROOT / path).exists():
        raise ValueError(f"a page links to ../{path}, which is not in the repository")
    return f"]({_place(path)})" if path.endswith(IMAGES) else f"]({REPOSITORY}/{path}{anchor})"


def _place(path: str) -> str:
    """Where an image of the repository lies in the site."""
    return "figures/" + path.replace("/", "-")
