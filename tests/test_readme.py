"""The README's and the docs' code runs as it stands.

Python blocks of a page share one namespace, as a reader would type them one after another; a block with a
title is a file of the reader's folder. In the guides the commands run too: what `$ servax serve` names is
served, and `$ curl` asks it.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
NEEDS = {"equinox.md": "equinox"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = NEEDS.get(page.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{page.name} needs {needed}: pip install {needed}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    with _own_modules(tmp_path), contextlib.ExitStack() as stack:
        reader = Reader(stack)
        for number, (language, title, block) in enumerate(BLOCK.findall(page.read_text())):
            if title:
                Path(title).write_text(block)
            elif language == "python":
                exec(compile(block, f"{page.name} block {number}", "exec"), namespace)
            elif language == "console" and page.parent.name == "guides":
                for command, shown in commands(block):
                    reader.do(command, shown)


@contextlib.contextmanager
def _own_modules(folder: Path) -> Iterator[None]:
    """Files of the folder that were imported are forgotten afterwards: the next page may use their names."""
    importlib.invalidate_caches()
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def commands(block: str) -> Iterator[tuple[list[str], str]]:
    """Each `$ command` of a block in words, and the text below it; quotes and backslashes join lines."""
    for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = entry.splitlines(keepends=True)
        for end in range(1, len(lines) + 1):
            command = "".join(lines[:end])
            with contextlib.suppress(ValueError):  # shlex's word for an open quote or a last backslash
                if not command.endswith("\\\n"):
                    yield shlex.split(command.replace("\\\n", " ")), "".join(lines[end:])
                    break
        else:
            raise AssertionError(f"a command must end, got {entry!r}")


class Reader:
    """Does what a guide's commands say, in this process, and compares what they show."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._url = ""
        self._stop = contextlib.ExitStack()
        stack.push(self._stop)

    def do(self, words: list[str], shown: str) -> None:
        if words[:2] == ["pip", "install"]:
            return
        if words[0] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                runpy.run_path(words[1], run_name="__main__")
            assert printed.getvalue() == shown
        elif words[:2] == ["servax", "serve"]:
            self._stop.close()
            self._url = self._stop.enter_context(serving(words[1:]))
        elif words[0] == "curl":
            ask(self._url, words[1:], shown)
        else:
            raise AssertionError(f"a guide's command must be one that this test knows, got {words}")


@contextlib.contextmanager
def serving(words: list[str]) -> Iterator[str]:
    """What `servax serve` makes of its arguments, on a socket of this process; yields its URL."""
    from servax.server.cli import wiring
    from servax.server.http.asgi import create_app
    from servax.server.http.testing import running
    from servax.server.metrics import Metrics

    cli = importlib.import_module("servax.server.cli.app")
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_serve", lambda settings: given.append(settings.config) or 0)
        cli.app(words, standalone_mode=False)
    config = given[0].model_copy(update={"seal": False, "use_store": False})
    metrics = Metrics()
    server, texts = wiring.build(config, metrics)
    with server, running(create_app(server, texts=texts, metrics=metrics, config=config.http)) as url:
        yield url


def ask(url: str, words: list[str], shown: str) -> None:
    """Sends what curl would and compares the answer with the one that the page shows."""
    import httpx

    path, data, headers = "", None, {}
    rest = iter(words)
    for word in rest:
        if word in ("-d", "-H"):
            value = next(rest)
            if word == "-H":
                headers.update([value.split(": ")])
            else:
                data = Path(value[1:]).read_text() if value.startswith("@") else value
        elif word != "-s":
            path = word.removeprefix("localhost:8000")
    answer = httpx.request("GET" if data is None else "POST", url + path, content=data, headers=headers)
    assert answer.status_code == 200, answer.text
    assert shown, f"{path} answered, and the page must show it: {answer.text}"
    _same(answer.json(), json.loads(shown))


def _same(got: Any, shown: Any) -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(shown, dict):
        assert list(got) == list(shown)
        for key in shown:
            _same(got[key], shown[key])
    elif isinstance(shown, list):
        assert len(got) == len(shown)
        for one, other in zip(got, shown, strict=True):
            _same(one, other)
    elif isinstance(shown, float):
        assert got == pytest.approx(shown, rel=1e-3, abs=2e-4)
    else:
        assert got == shown
