"""A headless browser spoken to over WebDriver's HTTP, and a page's server: for tests of the dashboard as it is shown.

chromedriver and Chromium are processes of their own with a fresh profile; both are ended by their PID and waited for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from tests.support_deadline import DEADLINE_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
WHY_NOT = (
    ""
    if CHROMIUM and CHROMEDRIVER
    else "chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""WebDriver's name for a reference to an element."""
SHIFT = "\ue008"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


class BrowserError(Exception):
    """WebDriver's error word and message."""


class Browser:
    """One window. Scripts are bodies of functions; their arguments are `arguments[0]` and so on."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._logged: list[dict[str, Any]] = []

    async def open(self, url: str) -> None:
        """Until it is loaded, with its modules."""
        await self._post("url", {"url": url})
        self._logged += await self._read_log()
        # An interface that comes or goes on this machine, such as a container's, makes Chromium give up what it loads.
        if any("ERR_NETWORK_CHANGED" in entry["message"] for entry in self._logged):
            self._logged = []
            await self.open(url)

    async def script(self, body: str, *arguments: Any) -> Any:
        return await self._post("execute/sync", {"script": body, "args": list(arguments)})

    async def of(self, selector: str, what: str) -> Any:
        """A property of the first such element, or what a method of it returns."""
        return await self.script(f"return document.querySelector(arguments[0]).{what}", selector)

    async def each(self, selector: str, what: str) -> Any:
        """As `of`, of each such element."""
        return await self.script(
            f"return [...document.querySelectorAll(arguments[0])].map((one) => one.{what})", selector
        )

    async def count(self, selector: str) -> Any:
        return await self.script("return document.querySelectorAll(arguments[0]).length", selector)

    async def wait(self, body: str, *arguments: Any) -> Any:
        """Until the expression is true; its value. The browser itself polls."""
        script = (
            "const done = arguments[arguments.length - 1], args = [...arguments].slice(0, -1);"
            f"const find = function () {{ return ({body}); }};"
            "const poll = () => { let value; try { value = find(...args); } catch (e) { value = null; }"
            " if (value) done(value); else setTimeout(poll, 20); }; poll();"
        )
        try:
            return await self._post("execute/async", {"script": script, "args": list(arguments)})
        except BrowserError as error:
            raise TimeoutError(f"{body} did not become true: {error}") from error

    async def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of the browser's own protocol."""
        return await self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    async def size(self, width: int, height: int) -> None:
        await self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def prefer(self, **features: str) -> None:
        """Media features, with `_` for `-`: prefer(prefers_color_scheme="dark")."""
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.cdp("Emulation.setEmulatedMedia", features=values)

    async def press(self, *keys: str) -> None:
        """Keys one after the other, by WebDriver's code or character."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    async def press_with_shift(self, key: str) -> None:
        pairs = (("keyDown", SHIFT), ("keyDown", key), ("keyUp", key), ("keyUp", SHIFT))
        actions = [{"type": kind, "value": value} for kind, value in pairs]
        await self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    async def click(self, selector: str) -> None:
        found = await self._post("element", {"using": "css selector", "value": selector})
        await self._post(f"element/{found[ELEMENT]}/click", {})

    async def log(self) -> list[dict[str, Any]]:
        """Problems in the console and in the loading of the page since the last call."""
        found, self._logged = self._logged + await self._read_log(), []
        return found

    async def _read_log(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._post("se/log", {"type": "browser"})
        return found

    async def screenshot(self, *, most_height: int = 4000, part: dict[str, float] | None = None) -> bytes:
        """The page from its top, in whole unless it is higher; or the rectangle x, y, width, height of it."""
        width, height = await self.script("const e = document.documentElement; return [e.clientWidth, e.scrollHeight]")
        clip = {"scale": 1, **(part or {"x": 0, "y": 0, "width": width, "height": min(height, most_height)})}
        found = await self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(f"{self._url}/{path}", json=body) as answer:
            value = (await answer.json())["value"]
        if isinstance(value, dict) and "error" in value and "stacktrace" in value:
            raise BrowserError(f"{value['error']}: {value['message'].splitlines()[0]}")
        return value


@asynccontextmanager
async def open_browser(*, width: int = 1280, height: int = 900) -> AsyncIterator[Browser]:
    """A browser with an empty profile below /tmp; everything of it is gone afterwards."""
    assert CHROMIUM is not None and CHROMEDRIVER is not None, WHY_NOT
    directory = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))
    try:
        async with _driver(directory) as url, ClientSession(timeout=ClientTimeout(total=2 * DEADLINE_S)) as session:
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={directory / 'profile'}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"script": int(DEADLINE_S * 1000), "pageLoad": int(DEADLINE_S * 1000)},
            }
            async with session.post(f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}) as answer:
                value = (await answer.json())["value"]
            assert "sessionId" in value, value
            browser = Browser(session, f"{url}/session/{value['sessionId']}")
            try:
                await browser.size(width, height)
                yield browser
            finally:
                async with session.delete(f"{url}/session/{value['sessionId']}") as answer:
                    await answer.read()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def _driver(directory: Path) -> AsyncIterator[str]:
    """chromedriver on a free port; it prints the port in its first lines. Its process group, the browser's too, is ended."""
    assert CHROMEDRIVER is not None
    home = {"HOME": str(directory), "TMPDIR": str(directory), "PATH": os.environ.get("PATH", "/usr/bin:/bin")}
    driver = await asyncio.create_subprocess_exec(
        CHROMEDRIVER,
        "--port=0",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=home,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while b"on port" not in (line := await driver.stdout.readline()) or b"started" not in line:
                assert line, "chromedriver ended before it listened"
        port = line.split()[-1].strip(b".\n").decode()
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await driver.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)


async def get_json(url: str) -> Any:
    async with asyncio.timeout(DEADLINE_S), ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200, (url, answer.status, await answer.text())
        return json.loads(await answer.read())
