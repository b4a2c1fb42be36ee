"""The live page in a real browser: what it shows, warm or not, and that it talks to nobody else."""

import shutil
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import servax
from servax import models
from servax.jit_cache import ProgramFacts, WarmBucket
from servax.server.fake import FakeEngine, doubler
from servax.server.generation import GenerationServer, StepRecord
from servax.server.generation.programs import Key
from servax.server.http.asgi import create_app
from servax.server.http.testing import running
from servax.server.metrics import Metrics

playwright = pytest.importorskip("playwright.sync_api", reason="the live page's test needs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="the live page's test needs Debian's chromium"),
    # Playwright leaves its event loop's transports to the collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Opens a URL; fails the test on a console error (a breach of the policy is one) or a foreign request."""
    complaints: list[str] = []
    pages: list[Any] = []

    def go(url: str, **options: Any) -> Any:
        page = browser.new_page(**options)
        pages.append(page)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type == "error" else None
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((url, "data:")) else complaints.append(request.url)
            ),
        )
        page.goto(url)
        return page

    yield go
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, servax.Server]]:
    servable = servax.Servable(
        lambda params, *, x: {"y": x * params},
        jnp.float32(2),
        inputs={"x": "float32[length]"},
        limits={"length": 32, "batch": 4},
        scheme="powers_of_two:8",
        name="tiny",
    )
    metrics = Metrics()
    with servax.Server(servable, on_batch=metrics.batch_record) as server:
        for length in (3, 9, 20, 20):
            server(x=np.ones(length, np.float32))
        with running(create_app(server, metrics=metrics)) as url:
            yield url, server


def test_the_grid_is_a_heat_map_of_what_ran(visit: Any, served: tuple[str, servax.Server]) -> None:
    url, server = served
    page = visit(url)
    page.wait_for_selector(".heat button")
    assert page.inner_text("#state") == "ready"
    assert page.locator(".heat button").count() == len(server.model().grid)
    assert page.locator(".chart svg[aria-label]").count() == 5
    cell = page.locator('button[data-key="tiny 1x32"]')
    assert cell.inner_text() == "2"
    cell.focus()
    playwright.expect(page.locator("#detail")).to_contain_text("2 rows")
    page.check('input[value="waste"]', force=True)
    assert page.inner_text('button[data-key="tiny 1x32"]') == "38 %"
    page.check('input[value="memory"]', force=True)
    assert "B" in page.inner_text('button[data-key="tiny 1x32"]')


def test_a_shape_is_explained(visit: Any, served: tuple[str, servax.Server]) -> None:
    page = visit(served[0])
    page.fill('input[name="length"]', "9")
    page.fill('input[name="rows"]', "1")
    page.click("text=Explain")
    page.wait_for_selector("#answer table")
    assert "costs least" in page.inner_text("#answer")


def test_it_fits_a_phone_in_the_dark(visit: Any, served: tuple[str, servax.Server]) -> None:
    page = visit(served[0], viewport={"width": 360, "height": 800}, color_scheme="dark")
    page.wait_for_selector(".heat button")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 28)"


def test_W3_it_works_while_the_server_warms_up(visit: Any) -> None:
    engine = FakeEngine(doubler())
    engine.cool(3)
    with running(create_app(engine)) as url:
        page = visit(url)
        playwright.expect(page.locator("#state")).to_have_text("warming")
        assert "3 of 29" in page.inner_text("#progress")
        engine.heat()
        playwright.expect(page.locator("#state")).to_have_text("ready")


def test_a_language_model_shows_what_its_programs_did(visit: Any) -> None:
    metrics = Metrics()
    server = GenerationServer(models.tiny(), name="writer", max_rows=2)
    facts = ProgramFacts(1.0, 1.0, 1.0, 1, 1, 1, 1, source="store")
    for key in (Key("zeros"), Key("decode", 2, 1)):
        server.report.warm.append(WarmBucket(key, facts, 0.25))
    metrics.step_record("writer", StepRecord("decode", 2, 1, 1, 2, 0.5, 7))
    with running(create_app(server, metrics=metrics)) as url:
        page = visit(url)
        page.wait_for_selector("#models td")
        assert "0 free pages, 0 waiting, 0 running" in page.inner_text("#models")
        assert page.inner_text("#models tbody tr").split("\t") == (
            ["decode 2x1", "store", "500 ms", "1", "1", "1", "50 %"]
        )
        assert page.locator("#models tbody tr").count() == 1
    # Nothing here has buckets: nothing to colour, to point at or to explain.
    for part in ("#metric", "#legend", "#detail", "#explain-part"):
        assert page.locator(part).is_hidden()
    sides = "nodes => nodes.map(node => getComputedStyle(node).textAlign)"
    assert page.eval_on_selector_all("#models th", sides) == ["left"] * 2 + ["right"] * 5
    assert page.eval_on_selector_all("#models tbody tr:first-child td", sides)[2:] == ["right"] * 5


def test_many_columns_are_wrapped_and_stay_readable(visit: Any) -> None:
    servable = servax.Servable(
        lambda params, *, x: {"y": x * params},
        jnp.float32(2),
        inputs={"x": "float32[words, docs]"},
        limits={"words": 128, "docs": 128, "batch": 2},
        scheme={"words": [8, 16, 32, 64, 100, 128], "docs": [8, 16, 32, 64, 100, 128]},
        name="wide",
    )
    engine = servax.Server(servable)  # never started: cold buckets have headings too
    with running(create_app(engine)) as url:
        page = visit(url)
        page.wait_for_selector(".heat button")
        assert page.locator(".heat").count() > 1
        assert page.locator(".heat button").count() == len(servable.grid)
        fits = "nodes => nodes.every(node => node.scrollWidth <= node.clientWidth)"
        assert page.eval_on_selector_all(".heat th:not(.corner)", fits)
