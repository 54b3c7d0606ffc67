"""The page /admin/ in a browser without a window, against a server that computes."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect
from real_house import RealHouse, real_house
from tiny_model import write_tiny_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000.0  # only a hang takes as long
FOREVER = aiohttp.ClientTimeout(total=None)
STEP_S = 0.02
"""A step at least: 5,000 tokens take longer than a test, so nobody ends between a look at the page and a click."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


@dataclass
class Tab:
    """A page that is open, and what has gone wrong in it."""

    page: Page
    faults: list[str] = field(default_factory=list)

    def note(self, message: ConsoleMessage) -> None:
        """What the browser says; with the address that it speaks of."""
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.text} {message.location['url']}")

    async def pixels(self) -> str:
        text: str = await self.page.evaluate("document.getElementById('frames').toDataURL()")
        return text


@asynccontextmanager
async def browser_at(house: RealHouse, scheme: Any = "light") -> AsyncIterator[Tab]:
    """The page of a server. What the browser complains of, policy violations too, fails the test at the end."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=PATIENCE_MS)
        context = await browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        tab = Tab(await context.new_page())
        tab.page.on("console", tab.note)
        tab.page.on("pageerror", lambda error: tab.faults.append(str(error)))
        await tab.page.goto(f"http://127.0.0.1:{house.server.admin_port}/admin/", wait_until="domcontentloaded")
        try:
            yield tab
        finally:
            await browser.close()


@asynccontextmanager
async def load(house: RealHouse, clients: int) -> AsyncIterator[list[int]]:
    """So many clients that ask again and again until the end; the statuses of their answers."""
    statuses: list[int] = []

    async def ask(client: int) -> None:
        turn = 0
        while True:
            turn += 1
            prompt = [*range(2, 60), 2 + client, 2 + turn % 50]
            body = {"prompt": prompt, "max_tokens": 5000, "ignore_eos": True}
            async with house.session.post(f"{house.url}/v1/completions", json=body, timeout=FOREVER) as response:
                await response.read()
                statuses.append(response.status)

    asking = [asyncio.create_task(ask(client)) for client in range(clients)]
    try:
        yield statuses
    finally:
        for task in asking:
            task.cancel()
        for task in asking:
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await task
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while list(house.engine.scheduler.open_sequences()):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHouse]:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "swap_memory_bytes": 1 << 18, "dtype": "bfloat16"}
    async with real_house(monkeypatch, folder, max_model_len=6000, **memory) as house:
        step = house.engine.step

        async def slow_step() -> None:
            await asyncio.sleep(STEP_S)
            await step()

        monkeypatch.setattr(house.engine, "step", slow_step)
        yield house


async def serious_faults(page: Page) -> list[str]:
    """What axe-core finds on the page as it stands."""
    found = await Axe().run(page)
    return [
        f"{fault['id']}: {[node['html'][:120] for node in fault['nodes'][:3]]}"
        for fault in found.response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]


async def test_an_operator_sees_memory_change_and_acts_on_it(house: RealHouse) -> None:
    async with browser_at(house) as tab:
        page = tab.page
        await expect(page.locator("#state")).to_have_text("live")
        await expect(page.locator("#legend li:nth-child(1) .figure")).to_have_text("1,024")
        idle = await tab.pixels()

        async with load(house, clients=3) as statuses:
            await expect(page.locator("#legend li:nth-child(2) .figure")).not_to_have_text("0")
            await page.wait_for_function("idle => document.getElementById('frames').toDataURL() !== idle", arg=idle)

            # one frame, by mouse and by keys
            await page.click("#frames", position={"x": 4, "y": 4})
            await expect(page.locator("#inspected")).to_contain_text("Frame 0:")
            await expect(page.locator("#facts")).to_contain_text("references")
            await page.keyboard.press("ArrowRight")
            await expect(page.locator("#inspected")).to_contain_text("Frame 1:")

            # a sequence stands still, is looked at, and is ended
            await page.click("#sequences-table button[data-action=pause] >> nth=0")
            row = page.locator("#sequences-table tr", has=page.locator("button[data-action=resume]")).first
            name = await row.locator("td").first.inner_text()
            await row.get_by_text("Details").click()
            await expect(page.locator("#details-state")).to_contain_text("waits: paused")
            await page.click("#do-show")
            await expect(page.locator("#unmark")).to_have_text(f"Only sequence {name}: show all")
            answers = len([status for status in statuses if status != 200])
            await row.get_by_text("Abort").click()
            await page.click("#confirm button[value=yes]")
            await expect(page.locator("#told")).to_contain_text(f"{name} abort: state")
            await expect(page.locator("#details-state")).to_have_text("has ended")
            assert len([status for status in statuses if status != 200]) == answers + 1

            # a prefix is held
            await page.click("#tab-cache")
            await page.click("#cache-table tbody button[aria-label^='Pin'] >> nth=0")
            await expect(page.locator("#told")).to_contain_text("pinned_frames 0 → ")
            await expect(page.locator("#pins-table tbody")).to_contain_text("admin page")
            await expect(page.locator("#legend li:nth-child(6) .figure")).not_to_have_text("0")
            assert (await house.meminfo())["pinned"] > 0
            await page.click("#pins-table button:text('Unpin')")
            await expect(page.locator("#pins-table tbody")).to_have_text("nothing is pinned")
            assert (await house.meminfo())["pinned"] == 0

            # a prefix that nobody maps is forgotten
            await page.select_option("#advise-prefix [name=advice]", "dontneed")
            await page.fill("#advise-prefix [name=content]", " ".join(map(str, range(2, 34))))
            await page.click("#advise-prefix button")
            await expect(page.locator("#told")).to_contain_text("advice – → dontneed")

            # a refusal is told
            await page.click("#tab-controls")
            await page.fill("#set-watermarks [name=min]", "5000")
            await page.click("#set-watermarks button")
            await expect(page.locator("#told.refused")).to_contain_text("watermarks:")
            # the refusal; and a look at the aborted one that was on its way when it ended
            gone = f"/sequences/{name}/"
            faults = [fault for fault in tab.faults if "400 (Bad Request)" not in fault]
            faults = [fault for fault in faults if "404 (Not Found)" not in fault or gone not in fault]
    assert faults == []


async def test_of_a_long_table_what_can_be_seen_is_in_the_document(house: RealHouse) -> None:
    """Any row can be scrolled to, and the one with the focus stays where it is."""
    async with browser_at(house) as tab:
        page = tab.page
        await expect(page.locator("#state")).to_have_text("live")
        await many_sequences(house, page, 500)
        rows, box = page.locator("#sequences-table tbody tr:not(.gap)"), page.locator("#sequences-table .scroll")
        await expect(rows.first).to_contain_text("0.0")
        assert await rows.count() < 60
        await box.evaluate("box => box.scrollTo(0, box.scrollHeight)")
        await expect(rows.last).to_contain_text("0.499")
        assert await rows.count() < 60
        await page.locator("button[aria-label='Details of 0.490']").focus()
        await box.evaluate("box => box.scrollTo(0, 0)")
        await expect(rows.first).to_contain_text("0.0")
        assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == "Details of 0.490"
    assert tab.faults == []


async def many_sequences(house: RealHouse, page: Page, count: int) -> None:
    """From now on the page is told of so many."""
    async with load(house, clients=1):
        url = f"http://127.0.0.1:{house.server.admin_port}/admin/v1/sequences"
        found: dict[str, Any] = {"sequences": []}
        while not found["sequences"]:
            async with house.session.get(url) as response:
                found = await response.json()
    one = found["sequences"][0]
    found |= {"total": count, "sequences": [one | {"id": f"0.{i}"} for i in range(count)]}
    await page.route("**/admin/v1/sequences?limit=500", lambda route: route.fulfill(json=found))


async def test_at_no_width_is_anything_cut_off_or_covered(house: RealHouse) -> None:
    cut = """all => all.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.innerText)"""
    async with load(house, clients=1), browser_at(house) as tab:
        page = tab.page
        await expect(page.locator("#state")).to_have_text("live")
        await page.click("#sequences-table button:text('Details') >> nth=0")
        await expect(page.locator("#details")).to_be_visible()
        for width in (360, 400, 799, 800, 1279, 1280, 1900):
            await page.set_viewport_size({"width": width, "height": 700})
            assert (width, await page.eval_on_selector_all(".keys, header, html", cut)) == (width, [])
            at_the_foot = await page.evaluate("document.elementFromPoint(innerWidth / 2, innerHeight - 4).tagName")
            assert at_the_foot != "FOOTER", "it has told nothing"
        await page.set_viewport_size({"width": 360, "height": 700})
        for name in ("queue", "oom", "cache", "misses", "tenants", "trace", "controls"):
            await page.click(f"#tab-{name}")
            assert (name, await page.eval_on_selector_all("html", cut)) == (name, [])
        await expect(page.locator("#set-overcommit select")).to_have_value("heuristic")
    assert tab.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_serious_fault_in_any_tab(house: RealHouse, scheme: str) -> None:
    await house.post("/v1/completions", {"prompt": list(range(2, 80)), "max_tokens": 4})
    async with load(house, clients=1), browser_at(house, scheme) as tab:  # it leaves before the sequence ends
        page = tab.page
        await expect(page.locator("#state")).to_have_text("live")
        await page.click("#sequences-table button:text('Details') >> nth=0")
        await page.click("#frames", position={"x": 4, "y": 4})
        await expect(page.locator("#facts")).to_contain_text("references")
        for name in ("sequences", "queue", "oom", "cache", "misses", "tenants", "trace", "controls"):
            await page.click(f"#tab-{name}")
            await expect(page.locator(f"#panel-{name}")).to_be_visible()
            assert (name, await serious_faults(page)) == (name, [])
    assert tab.faults == []


async def test_the_admin_key_is_asked_for_and_stays_out_of_addresses(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    async with (
        real_house(monkeypatch, folder, max_model_len=200, admin_api_key="root", api_keys=["user"]) as house,
        browser_at(house) as tab,
    ):
        page, addresses = tab.page, []
        page.on("request", lambda request: addresses.append(request.url))
        await page.fill("#key", "lunch")
        await page.keyboard.press("Enter")
        await expect(page.locator("#key-reason")).to_have_text("This key opens nothing here.")
        await page.fill("#key", "user")  # opens the API, not this
        await page.keyboard.press("Enter")
        await page.fill("#key", "root")
        await page.keyboard.press("Enter")
        await expect(page.locator("#state")).to_have_text("live")
        await page.reload(wait_until="domcontentloaded")
        await expect(page.locator("#state")).to_have_text("live")
        assert len(addresses) > 5
        assert all("root" not in address for address in addresses)
        assert all("401 (Unauthorized)" in fault or "403 (Forbidden)" in fault for fault in tab.faults)
