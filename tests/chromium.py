"""Chromium, driven through its debugging pipe: no package is needed, and no port is opened."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no chromium or google-chrome is installed to open the page in"
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
KEYS = {"Enter": "\r", "Tab": "\t", " ": " "}


class Browser:
    """One page of a Chromium of its own.

    Args:
        profile: a folder for it.
        width: of the window, in pixels.
        height: the same.

    Attributes:
        problems: what the page has put on its console as an error or a warning, and scripts that failed.
    """

    def __init__(self, profile: Path, width: int = 1200, height: int = 900):
        if PROGRAM is None:
            raise RuntimeError(MISSING)
        (commands, self._write), (self._read, answers) = os.pipe(), os.pipe()
        # Chromium reads what it is told at 3, and answers at 4
        redirect = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        arguments = [*QUIET, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, PROGRAM, *arguments], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands), os.close(answers)
        self.problems: list[str] = []
        self._number, self._rest, self._session, self._loaded = 0, b"", None, False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.send("Browser.close")  # all of its processes: what is killed leaves some that still write to its profile
        os.close(self._write), os.close(self._read)
        self.process.wait(timeout=20)

    def send(self, method: str, **parameters: Any) -> dict:
        """Call a method of the protocol; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._write, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        self._loaded |= method == "Page.loadEventFired"
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        if method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and parameters["type"] != "log"):
            self.problems.append(str(parameters))

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Open a file or an address, at a fragment such as "#3-7", and wait until it has loaded."""
        address = page.as_uri() if isinstance(page, Path) else page
        for url in ("about:blank", address + fragment):  # from the same page a fragment would load nothing
            self._loaded = False
            self.send("Page.navigate", url=url)
            while not self._loaded:
                self._note(self._next())

    def value(self, script: str) -> Any:
        """The value of an expression in the page; promises are waited for."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true, ten seconds at most."""
        look = f"({script}) ? done() : Date.now() - begin > 10000 ? failed(new Error('in vain')) : setTimeout(look, 10)"
        expression = (
            f"new Promise((done, failed) => {{ const begin = Date.now(); const look = () => {look}; look(); }})"
        )
        self.value(expression)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, as a mouse does."""
        where = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **where, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self.middle(selector))

    def middle(self, selector: str) -> dict[str, float]:
        """The middle of an element, after scrolling to it."""
        found = f"document.querySelector({json.dumps(selector)})"
        return self.value(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
            "return {x: r.left + r.width / 2, y: r.top + r.height / 2}; })()"
        )

    def press(self, *keys: str) -> None:
        """Press keys, such as "ArrowRight" or "Enter"."""
        codes = {
            "PageUp": 33,
            "PageDown": 34,
            "Enter": 13,
            "Tab": 9,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            text = {"text": KEYS[key]} if key in KEYS else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the page, below what a window can be, too."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefer "dark" or "light"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def without_scripts(self) -> None:
        """Run no scripts from now on."""
        self.send("Emulation.setScriptExecutionDisabled", value=True)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        image = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(image["data"]))

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**{side: size[side] for side in ("x", "y", "width", "height")}, "scale": 1}}
