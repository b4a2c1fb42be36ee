"""Packages that only some experiments need: asked for before anything is measured, imported where used."""

from importlib.util import find_spec


def require(*packages: str) -> None:
    """End the command with a remedy if a package is not installed.

    Args:
        packages: names to import, of the extra `experiments`.

    Raises:
        SystemExit: naming what is missing and how to install it.
    """
    if missing := [name for name in packages if find_spec(name) is None]:
        raise SystemExit(
            f"this experiment, or a figure of it, needs the extra `experiments`; {', '.join(missing)} cannot "
            "be imported: pip install '.[experiments]' in a checkout of servax, or leave figures out"
        )
