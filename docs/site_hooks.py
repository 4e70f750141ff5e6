"""What `make site` does to the pages: README.md becomes the front page, and what lies beside docs/
is named instead of linked, since it is no part of the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name what is linked beside docs/."""
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)]*)\)", r"\1 (`\2`)", markdown)
