"""A real browser that opens pages from disk with the network off."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium")
OPTIONS = (
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no page is opened in a browser: chromium is missing; apt-get install chromium"
)


@contextmanager
def launch_chromium():
    """Chromium, until the end of the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()


class Opened:
    """A page, and what it asked for, complained of and popped up."""

    def __init__(self, browser, path, *, ready="html[data-charts=drawn]", **options):
        """Open the file at the path, and wait for what the selector `ready` names."""
        self.context = browser.new_context(accept_downloads=True, **options)
        self.context.set_offline(True)
        self.url, self.requests, self.complaints, self.dialogs = path.as_uri(), [], [], []
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.goto(self.url)
        self.page.wait_for_selector(ready)

    def _dismiss(self, dialog):
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def foreign_requests(self):
        """What was asked for besides the page and what it holds itself."""
        return [url for url in self.requests if url != self.url and not url.startswith(("data:", "blob:"))]
