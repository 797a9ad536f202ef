"""A headless Chromium that tests drive by the DevTools protocol, over a pair of pipes."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.served import comes_true

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"


class Page:
    """A tab; `errors` has its uncaught errors and what its Content-Security-Policy refused."""

    def __init__(self, browser: "Browser", address: str):
        self.browser, self.errors, self.loaded = browser, [], False
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Runtime", "Log", "Page"):
            browser.call(f"{domain}.enable", self.session)
        browser.call("Page.navigate", self.session, url=address)
        assert comes_true(self._is_loaded), f"{address} does not load"

    def note(self, event: str, told: dict[str, Any]) -> None:
        """Notes an event of the tab."""
        self.loaded |= event == "Page.loadEventFired"
        if event == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"]["exception"].get("description", "an error"))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])

    def run(self, script: str) -> Any:
        """Returns the value of a script, which runs as if typed into the console."""
        options = dict(expression=script, returnByValue=True, awaitPromise=True)
        found = self.browser.call("Runtime.evaluate", self.session, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _is_loaded(self) -> bool:
        # Any call reads the events before its answer.
        self.browser.call("Browser.getVersion")
        return self.loaded

    def becomes(self, script: str, seconds: float = 20) -> bool:
        """Waits until a script's value is true; False if the time is over first."""
        return comes_true(lambda: bool(self.run(script)), seconds)


class Browser:
    """A running Chromium."""

    def __init__(self, commands: Any, answers: Any):
        self.pages: dict[str, Page] = {}
        self._commands, self._answers, self._numbers = commands, answers, itertools.count(1)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a method of the protocol; notes the events that come before it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            if (page := self.pages.get(answer.get("sessionId", ""))) is not None:
                page.note(answer["method"], answer["params"])
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return json.loads(found)


@contextlib.contextmanager
def opened(profile: str) -> Iterator[Browser]:
    """Starts a browser with its files in the folder `profile`; skips the test on machines without one."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The protocol's pipes are the files 3 and 4. In containers Chromium's own sandbox does not start.
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program, *options]
    process = subprocess.Popen(shell, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with open(ours_out, "wb", buffering=0) as commands, open(ours_in, "rb") as answers:
            yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(20)
