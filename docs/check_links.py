"""Checks the built site: every link to a page, a heading, a file or a picture leads somewhere.

python docs/check_links.py build/site
"""

import html.parser
import sys
import urllib.parse
from pathlib import Path


class Page(html.parser.HTMLParser):
    """The targets of a page, and what it links to."""

    def __init__(self, file: Path):
        super().__init__()
        self.file = file
        self.names: set[str] = set()
        self.links: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects names and links."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.names.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """The links of all pages that lead nowhere; those to other sites are not followed."""
    # Sphinx's pages of sources link back by one name of a module, which may have several.
    skipped = {"_static", "_modules"}
    files = (file for file in site.rglob("*.html") if not skipped & {*file.parts})
    pages = {file.resolve(): Page(file) for file in files}
    found = []
    for page in pages.values():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc or link == "#":
                continue
            path = urllib.parse.unquote(url.path)
            file = (page.file.parent / path).resolve() if path else page.file.resolve()
            name = urllib.parse.unquote(url.fragment)
            if not file.exists() or (name and file in pages and name not in pages[file].names):
                found.append(f"{page.file}: {link}")
    return found


def main() -> None:
    """Exit code 1 if a link is broken."""
    found = broken(Path(sys.argv[1]))
    sys.exit("broken links:\n" + "\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
