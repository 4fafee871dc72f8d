"""A page in the browser, and everything that must not happen in one: errors, dialogs, requests to other origins."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Error, Page, Request

from tests.browser import hostile

_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`));
"""
# What only a text that became markup could bring: scripts within the page besides its import map, links that lead away,
# and pictures that the page has not read itself.
_FOREIGN = """
() => [
  ...[...document.scripts].filter((script) => !script.src && script.type !== "importmap").map((found) => found.text),
  ...[...document.links].filter((link) => link.origin !== location.origin).map((link) => `link: ${link.href}`),
  ...[...document.images].filter((image) => !image.src.startsWith("blob:")).map((image) => `picture: ${image.src}`),
]
"""


class Watched:
    """Watches the pages of a context. `allow` names what a test provokes, such as the 401 of a wrong key."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        """`origin`: that of the server, the only one that may be asked."""
        self._origin = origin
        self._problems: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        self._context = context
        context.add_init_script(_VIOLATIONS)
        context.on("console", self._console)
        context.on("weberror", lambda error: self._problems.append(f"page error: {error.error}"))
        context.on("dialog", self._dialog)
        context.on("request", self._request)

    def allow(self, pattern: str) -> None:
        """Expect problems whose text has `pattern`."""
        self._allowed.append(re.compile(pattern))

    @property
    def problems(self) -> list[str]:
        """What happened that no test has allowed."""
        for page in self._context.pages:
            self._look(page)
        return [text for text in self._problems if not any(allowed.search(text) for allowed in self._allowed)]

    def _look(self, page: Page) -> None:
        """Look for what hostile texts would leave behind."""
        try:
            self._problems += [f"content security policy: {text}" for text in page.evaluate("window.violations ?? []")]
            if page.evaluate(f"'{hostile.MARKER}' in window"):
                self._problems.append("a script in a text of an agent ran")
            if made := page.evaluate(f"document.querySelectorAll('{','.join(hostile.MADE)}').length"):
                self._problems.append(f"{made} elements that only texts of agents would make")
            self._problems += page.evaluate(_FOREIGN)
        except Error as problem:
            self._problems.append(f"the page cannot be looked at: {problem}")

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._problems.append(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _dialog(self, dialog: Dialog) -> None:
        self._problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and f"{address.scheme}://{address.netloc}" != self._origin:
            self._problems.append(f"request to another origin: {request.url[:200]}")
