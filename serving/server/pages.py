"""Names the pages for browsers, the dashboard's files, and the headers that they are sent with."""

from pathlib import Path

FOLDER = Path(__file__).parent / "dashboard"
# Path -> file and its media type.
FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard/style.css": ("style.css", "text/css"),
    "/dashboard/page.js": ("page.js", "text/javascript"),
    "/dashboard/chat.js": ("chat.js", "text/javascript"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The document of the API and the page that shows it.
DOCUMENT, DOCS = "/openapi.json", "/docs"
# Paths that contain no data: a browser loads them before it can send a key.
PAGES = frozenset({*FILES, DOCUMENT, DOCS})
# Scripts, styles and requests of this origin only; nothing inline, no frames, no form submission.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}  # fmt: skip
