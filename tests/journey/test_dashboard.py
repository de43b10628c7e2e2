"""The dashboard over real sockets, and in a real browser if one is installed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import httpx2
import pytest

from services.router.frontend import dashboard, history
from services.router.frontend.dashboard import HEADER, PAGES
from tandem.async_client import AsyncClient
from tandem.errors import InvalidRequest

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"
PAGE = {HEADER: "1"}
EVENTS = "/dashboard/events"
DRIVER = shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture
def web(inside: Any) -> Any:
    """`async with web(**settings) as (cluster, client)`."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[tuple[Any, httpx2.AsyncClient]]:
        async with inside(http_port=0, **settings) as cluster:
            async with httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=60) as client:
                yield cluster, client

    return start


async def told(client: httpx2.AsyncClient, **headers: str) -> AsyncIterator[tuple[str, Any]]:
    """Each event with its value."""
    async with client.stream("GET", EVENTS, headers={**PAGE, **headers}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line:
                yield name, json.loads(line.removeprefix("data: "))


async def scaled(cluster: Any) -> dict[str, int]:
    wanted: dict[str, int] = await cluster.router.models.first.pools.registry.wanted()
    return wanted


async def test_without_keys_the_page_works_from_this_machine_and_for_nobody_else(
    web: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page, stream and actions work; a page of another site, or a request with a foreign host name, gets nothing."""
    monkeypatch.setattr(dashboard, "TICK_S", 0.05)
    monkeypatch.setattr(history, "SAMPLE_S", 3600.0)  # the history has the points that the test takes
    traces = "http://localhost:16686/trace/{trace_id}"
    scaled_by = {"autoscale": "dry-run", "decode_max": 2, "trace_url": traces}
    async with web(slo_ttft_s=30.0, slo_tpot_s=30.0, **scaled_by) as (cluster, client):
        verdict = {"role": "decode", "size": 1, "wanted": 2, "why": "9 requests"}
        said = json.dumps({"mode": "dry-run", "at": time(), "pools": [verdict]})
        await cluster.router.models.first.pools.registry.publish_scaling(said)
        await cluster.client.generate([1, 2, 3], max_tokens=4, ignore_eos=True, request_id="mine")
        for path in PAGES:
            page = await client.get(path)
            assert page.status_code == 200
            assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            assert page.headers["x-content-type-options"] == "nosniff"
        async with aclosing(told(client)) as events:
            _, state = await anext(events)
            name, receipts = await anext(events)
            assert name == "receipts"
            assert [worker["worker_id"] for worker in state["workers"]] == ["decode-0", "prefill-0", "router-0"]
            assert (state["ended"], state["met"], state["outcomes"]) == (1, 1, {"ok": 1})
            assert state["links"][0]["bytes"] > 0
            assert (state["autoscale"]["mode"], state["autoscale"]["pools"]) == ("dry-run", [verdict])
            assert state["trace_url"] == traces
            assert (receipts[0]["request_id"], sum(receipts[0]["phases"].values())) == (
                "mine",
                pytest.approx(receipts[0]["ttft"]),
            )
            assert [(await anext(events))[0] for _ in range(2)] == ["failures", "history"]
            assert [(await anext(events))[0] for _ in range(2)] == ["state", "state"]  # nothing ended since
            await cluster.client.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
            async for name, value in events:
                if name == "receipts":
                    assert len(value) == 2
                    break

            # A refused request appears at once, and a point of the history when it is sampled.
            with pytest.raises(InvalidRequest):
                await cluster.client.generate([1, 2, 3], max_tokens=0, request_id="wrong")
            await cluster.router.history.take()
            found = {}
            async for name, value in events:
                found[name] = value
                if {"failures", "history"} <= found.keys():
                    break
            (refused,) = found["failures"]
            assert (refused["outcome"], refused["request_id"], refused["router"]) == ("refused", "wrong", "router-0")
            (point,) = found["history"]["points"]
            assert len(point) == len(found["history"]["columns"])

        # Actions: first those that are refused, then valid ones.
        await cluster.router.models.first.pools.registry.set_wanted({"prefill": 1, "decode": 1})
        target = "/dashboard/pools/prefill?size=2"
        rebound = {**PAGE, "host": "evil.example:8000"}
        for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}, rebound, {**PAGE, "host": "["}):
            refused = await client.post(target, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "PERMISSION_DENIED")
            assert (await client.get(EVENTS, headers=headers)).status_code == 403
        with monkeypatch.context() as patch:
            patch.setattr(dashboard, "_from_here", lambda _: False)  # as from another machine
            assert (await client.post(target, headers=PAGE)).status_code == 403
            assert (await client.get(EVENTS, headers=PAGE)).status_code == 403
        preflight = await client.options(target, headers={"origin": "http://evil.example"})
        assert not [name for name in preflight.headers if name.startswith("access-control")]
        assert await scaled(cluster) == {"prefill": 1, "decode": 1}
        done = await client.post(target, headers=PAGE)
        assert (done.status_code, done.json()) == (200, {"wanted": {"prefill": 2, "decode": 1}})
        assert await scaled(cluster) == {"prefill": 2, "decode": 1}

        for wrong in (
            "prefill?size=1e9",
            "decode?size=0",
            "prefill",
            "prefill?size=x",
            "prefill?size=1.5",
            "other?size=1",
        ):
            refused = await client.post(f"/dashboard/pools/{wrong}", headers=PAGE)
            assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error"), wrong
        drain = "/dashboard/workers/{}/drain?grace={}"
        for name, grace, status in (("decode-9", "1", 404), ("router-0", "1", 400), ("decode-0", "nan", 400)):
            assert (await client.post(drain.format(name, grace), headers=PAGE)).status_code == status
        done = await client.post(drain.format("prefill-0", "1"), headers=PAGE)
        assert (done.status_code, done.json()) == (200, {"finished": 0, "cut": 0})


async def test_with_keys_only_an_admin_sees_and_acts_and_open_dashboards_are_bounded(
    web: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys the rules are those of gRPC, from any address; a key that is removed sees no more; a stopping router
    waits for no dashboard."""
    monkeypatch.setattr(dashboard, "TICK_S", 0.05)
    monkeypatch.setattr(dashboard, "MAX_STREAMS", 2)
    monkeypatch.setattr("services.router.tenancy.api_keys.RECHECK_S", 0.0)
    monkeypatch.setattr("services.router.tenancy.api_keys.MAX_LOOK_S", 30.0)
    file = tmp_path / "keys"
    file.write_text(f"anna {USER}\nops {ADMIN} admin\n")
    async with web(api_keys=file) as (cluster, client):
        target = "/dashboard/pools/prefill?size=2"
        await cluster.router.models.first.pools.registry.set_wanted({"prefill": 1, "decode": 1})
        for key, status in (("", 401), ("wrong-key-0123456789", 401), (USER, 403)):
            for method, path in (
                ("GET", EVENTS),
                ("POST", target),
                ("POST", "/dashboard/workers/decode-0/drain?grace=0"),
            ):
                given = {"authorization": f"Bearer {key}"} if key else {}
                refused = await client.request(method, path, headers={**PAGE, **given})
                assert refused.status_code == status
        assert (await client.post(target, headers={"authorization": f"Bearer {ADMIN}"})).status_code == 403  # no header
        assert await scaled(cluster) == {"prefill": 1, "decode": 1}
        assert (await client.get("/dashboard")).status_code == 200
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert (await client.post(target, headers={**PAGE, **admin, "host": "tandem.example"})).status_code == 200

        async with aclosing(told(client, **admin)) as one, aclosing(told(client, **admin)) as other:
            assert [(await anext(one))[0], (await anext(other))[0]] == ["state", "state"]
            full = await client.get(EVENTS, headers={**PAGE, **admin})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "DASHBOARDS")
            file.write_text(f"anna {USER}\n")
            async with asyncio.timeout(30):
                async for _ in one:  # until it ends
                    pass
        async with asyncio.timeout(30):
            while cluster.router.dashboard.opened:  # noqa: ASYNC110 (it offers no event)
                await asyncio.sleep(0.01)
        file.write_text(f"ops {ADMIN} admin\n")
        async with aclosing(told(client, **admin)) as one:
            await anext(one)
            async with asyncio.timeout(30):
                await cluster.router.stop(60.0)
                async for _ in one:  # until it ends
                    pass


# ---- in a browser


class Browser:
    """Chromium over WebDriver, which is HTTP and JSON."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._session = ""

    async def open(self, profile: Path) -> None:
        options = {"args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=500,900"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = await self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self._client.request(method, self._session + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    async def run(self, script: str) -> Any:
        return await self.call("POST", "/execute/sync", {"script": script, "args": []})

    async def until(self, condition: str) -> None:
        """Waits until the expression is true in the page, checked after each of its changes."""
        script = (
            "const done = arguments[arguments.length - 1];"
            f"const look = () => {{ if ({condition}) {{ watch.disconnect(); done(true); }} }};"
            "const watch = new MutationObserver(look);"
            "watch.observe(document, {subtree: true, childList: true, attributes: true, characterData: true}); look();"
        )
        await self.call("POST", "/execute/async", {"script": script, "args": []})

    async def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    if DRIVER is None or shutil.which("chromium") is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    driver = subprocess.Popen(  # noqa: ASYNC220 (it only starts)
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        said = await asyncio.wait_for(
            asyncio.to_thread(_line, driver.stdout, r"started successfully on port (\d+)"), 20
        )
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{said}", timeout=30) as client:
            one = Browser(client)
            await one.open(tmp_path / "profile")
            yield one
            await one.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)


def _line(lines: Any, pattern: str) -> str:
    return next(found[1] for line in lines if (found := re.search(pattern, line)))


TAB, ENTER, DOWN, ESCAPE = "\ue004", "\ue007", "\ue015", "\ue00c"
EVIL = "<img src=x onerror=document.title='taken'>"


async def test_in_chromium_it_lives_scales_by_keyboard_and_shows_text_as_text(
    web: Any, browser: Browser, tmp_path: Path
) -> None:
    """At phone width: the page requests the key, shows the cluster's texts as text, moves through the requests by arrow
    keys, and scales a pool from the keyboard; Escape scales nothing. The console has no error and no violation of the
    policy."""
    file = tmp_path / "keys"
    file.write_text(f"anna {USER}\nops {ADMIN} admin\n")
    async with web(api_keys=file) as (cluster, _):
        await cluster.router.models.first.pools.registry.set_wanted({"prefill": 1, "decode": 1})
        async with AsyncClient(cluster.router.address, api_key=USER) as user:
            for name in ("first", EVIL):
                await user.generate([1, 2, 3], max_tokens=4, ignore_eos=True, request_id=name)
            with pytest.raises(InvalidRequest):
                await user.generate([1, 2, 3], max_tokens=0, request_id=EVIL)
        await browser.call("POST", "/url", {"url": f"http://{cluster.router.http.address}/dashboard"})
        await browser.until("document.activeElement.id === 'key'")
        await browser.press(*ADMIN, ENTER)
        await browser.until("document.querySelector('#live').dataset.state === 'live'")
        await browser.until("document.querySelectorAll('#list [role=option]').length === 2")
        ids = "return [...document.querySelectorAll('#list .id')].map((one) => one.textContent)"
        assert await browser.run(ids) == [EVIL, "first"]
        assert await browser.run("return [document.images.length, document.title]") == [1, "Tandem"]
        assert await browser.run("return document.documentElement.scrollWidth <= innerWidth")
        await browser.until("document.querySelectorAll('#history canvas').length === 4")
        await cluster.router.history.take()
        await browser.until(
            "/^a point every 10 s, from \\d\\d:\\d\\d$/.test(document.querySelector('#history-about').textContent)"
        )
        failed = (
            "return [...document.querySelectorAll('#failures .id, #failures .outcome')].map((one) => one.textContent)"
        )
        assert await browser.run(failed) == ["refused", EVIL]
        phases = "return [...document.querySelectorAll('.waterfall .numbers')].length"
        assert await browser.run(phases) == 10  # eight until the first token, two of the whole request

        await browser.run("document.querySelector('#list').focus()")
        await browser.press(DOWN)
        assert await browser.run("return document.querySelector('#receipt h3').textContent") == "first"

        one_more = "document.querySelector('[aria-label=\"one prefill worker more\"]')"
        for last in (ESCAPE, ENTER):  # the dialog begins on Cancel
            await browser.run(f"{one_more}.focus()")
            await browser.press(ENTER)
            await browser.until("document.querySelector('#sure').open")
            await browser.press(*((last,) if last == ESCAPE else (TAB, ENTER)))
            await browser.until("!document.querySelector('#sure').open")
            if last == ESCAPE:
                assert await scaled(cluster) == {"prefill": 1, "decode": 1}
        await browser.until("document.querySelector('#said').textContent === '2 prefill workers wanted'")
        assert await scaled(cluster) == {"prefill": 2, "decode": 1}
        await browser.until("document.querySelector('#warning').textContent === '1 of 2 prefill workers are ready'")
        said = await browser.call("POST", "/se/log", {"type": "browser"})
        assert [one["message"] for one in said if "401" not in one["message"]] == []
        # Control: if the page had created anything from markup, the browser would have blocked and reported it.
        markup = "try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch (error) { return error.name; }"
        assert await browser.run(markup) == "TypeError"
        assert await browser.call("POST", "/se/log", {"type": "browser"})
