"""Brings pages that lie outside of docs/ into the site: README.md as its home, and files that pages link to.

Readers of the repository and of the site follow the same links: a link from a page to a file of the repository becomes one to a
copy in the site. A link to a file that is not there stays as it is, and mkdocs then fails.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages in the repository's root, by their names in the site."""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    """Adds the pages of the root, and each file of the repository that a page links to."""
    for name, target in PAGES.items():
        files.append(File.generated(config, target, content=with_links_of_site((ROOT / name).read_text(), ROOT)))
    pages = [*(ROOT / name for name in PAGES), *Path(config["docs_dir"]).rglob("*.md")]
    linked = {page.parent / link for page in pages for link, _ in LINK.findall(page.read_text())}
    for path in sorted({Path(os.path.normpath(path)) for path in linked}):
        if (
            path.is_file()
            and path.suffix != ".md"
            and path.is_relative_to(ROOT)
            and not path.is_relative_to(config["docs_dir"])
        ):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Turns links that leave docs/ into links within the site."""
    folder = Path(page.file.src_path).parent
    return with_links_of_site(markdown, Path(config["docs_dir"]) / folder, str(folder))


def with_links_of_site(markdown: str, folder: Path, place: str = ".") -> str:
    """Returns the text of a page in `folder` with the links of a page in the site's folder `place`.

    The site has copies of the root's files next to the pages of docs/.
    """

    def replace(match: re.Match) -> str:
        link, anchor = match.group(1), match.group(2) or ""
        path = Path(os.path.normpath(folder / link))
        if not path.is_file() or not path.is_relative_to(ROOT):
            return match.group(0)
        name = str(path.relative_to(ROOT))
        return f"]({os.path.relpath(PAGES.get(name, name.removeprefix('docs/')), place)}{anchor})"

    return LINK.sub(replace, markdown)
