"""Builds a page from the files in this folder: one document with its styles and script, and the headers that guard it."""

import base64
import functools
import hashlib
from pathlib import Path
from typing import NamedTuple


class Document(NamedTuple):
    """An HTML document, and the headers that it must be sent with."""

    html: bytes
    headers: dict[str, str]


@functools.cache
def document(name: str) -> Document:
    """Returns the page `name`: "run" follows a run, "chat" talks to a server.

    Its Content-Security-Policy allows the page's own style and script, by their hashes, and requests to its own server.
    Trusted Types also make Chromium refuse text as HTML, so that texts of models and prompts can only be shown as text.
    """
    folder = Path(__file__).parent
    style, shared, own, body = (
        (folder / file).read_text(encoding="utf-8") for file in ("shared.css", "shared.js", f"{name}.js", f"{name}.html")
    )
    script = f"{shared}\n{own}"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    html = f'<!doctype html>\n<html lang="en">{head}<style>{style}</style>\n<body>{body}<script>{script}</script></body></html>'
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Document(html.encode(), headers)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
