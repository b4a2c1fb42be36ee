"""Hooks of mkdocs: pages that are kept elsewhere join the site, and docstrings are found."""

import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# From the file to its page; the figures of the experiments come along as `plots/`.
PAGES = {"experiments/README.md": "experiments.md", "CHANGELOG.md": "changelog.md"}
PICTURES = "experiments/plots"
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")  # relative, without its anchor
ROOMS = ("bucketing", "jit_cache", "models", "server")
_sources = tempfile.TemporaryDirectory(prefix="servax-docs-")


@event_priority(100)  # before mkdocstrings reads its own configuration
def on_config(config: Any) -> Any:
    """The repository's root is the package, under another name: show it to mkdocstrings as `servax`."""
    package = Path(_sources.name) / "servax"
    if not package.exists():
        package.mkdir()
        for path in (*ROOT.glob("*.py"), *(ROOT / room for room in ROOMS)):
            (package / path.name).symlink_to(path, target_is_directory=path.is_dir())
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_sources.name]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the experiments, their figures and the changelog."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"plots/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links are written as they work in the repository; here they get the files' places on the site."""
    place = page.file.src_uri
    sources = {name: source for source, name in PAGES.items()}
    folder = posixpath.dirname(sources.get(place, f"docs/{place}"))

    def moved(link: re.Match[str]) -> str:
        target = site_place(posixpath.normpath(posixpath.join(folder, link[0])))
        return posixpath.relpath(target, posixpath.dirname(place) or ".") if target else link[0]

    return LINK.sub(moved, markdown)


def site_place(path: str) -> str | None:
    """The place on the site of a file of the repository; None if it is not there."""
    if path.startswith(f"{PICTURES}/"):
        return f"plots/{posixpath.basename(path)}"
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
