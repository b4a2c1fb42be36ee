"""Hooks of mkdocs: pages that are kept elsewhere join the site, and docstrings are found."""

import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# From the file to its page; folders of pictures come along under the same relative path.
PAGES = {"experiments/README.md": "experiments.md", "CHANGELOG.md": "changelog.md"}
PICTURES = "experiments/plots"
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
        text = (ROOT / source).read_text(encoding="utf-8").replace("](../docs/", "](")
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / PICTURES).glob("*.png")):
        files.append(File.generated(config, f"plots/{picture.name}", abs_src_path=str(picture)))
    return files
