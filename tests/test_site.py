"""The documentation's site builds without a warning and fetches nothing from elsewhere; its links work in the
repository too."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "experiments/README.md", "experiments/data/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINKED = re.compile(r"\]\(([^)\s]+)")
FETCHED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?https?://[^\">\s]*")


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"the site needs {module}: pip install 'servax[docs]'")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert not FETCHED.findall(page.read_text()), page
    assert 'id="servax.Servable"' in (tmp_path / "site" / "reference" / "servax.html").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    links = LINKED.findall(FENCED.sub("", page.read_text()))
    missing = [
        link for link in links if ":" not in link and not (page.parent / link.partition("#")[0]).exists()
    ]
    assert not missing, f"a relative link must name a file of the repository, got {missing} in {page}"
