"""Every name in a checkpoint is accounted for: used, known and left out, or reported."""

import re
from collections.abc import Callable, Iterable, Mapping

from .errors import TensorMismatch

Shape = tuple[int, ...]


def match(
    wanted: Mapping[str, Shape],
    found: Mapping[str, Shape],
    *,
    canonical: Callable[[str], str],
    left_out: re.Pattern[str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Compare a checkpoint's names and shapes with what a model needs.

    Args:
        wanted: shape by the model's name.
        found: shape by the checkpoint's name.
        canonical: the model's name for a checkpoint's name.
        left_out: model names that are known and not used.

    Returns:
        The checkpoint's name by the model's name, and the checkpoint's names that are left out.

    Raises:
        TensorMismatch: names every missing, unexpected and wrongly shaped tensor at once.
    """
    names: dict[str, str] = {}
    known: list[str] = []
    unexpected: list[str] = []
    for name in sorted(found):
        plain = canonical(name)
        if plain in wanted and plain not in names:
            names[plain] = name
        else:
            (known if left_out.match(plain) else unexpected).append(name)
    missing = tuple(name for name in wanted if name not in names)
    pairs = {name: (wanted[plain], tuple(found[name])) for plain, name in names.items()}
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if missing or unexpected or wrong:
        raise _mismatch(missing, tuple(unexpected), wrong)
    return names, tuple(known)


def _mismatch(
    missing: tuple[str, ...], unexpected: tuple[str, ...], wrong: dict[str, tuple[Shape, Shape]]
) -> TensorMismatch:
    def section(title: str, lines: Iterable[str]) -> str:
        lines = list(lines)
        return "".join([f"\n{len(lines)} {title}:", *(f"\n  {line}" for line in lines)]) if lines else ""

    shapes = (f"{name}: expected {want}, got {got}" for name, (want, got) in wrong.items())
    return TensorMismatch(
        "a checkpoint's tensors must be exactly those that its configuration describes, got "
        f"{len(missing)} missing, {len(unexpected)} unexpected and {len(wrong)} of the wrong shape: "
        "check that configuration and weights belong together"
        + section("missing", missing)
        + section("unexpected", unexpected)
        + section("of the wrong shape", shapes),
        missing=missing,
        unexpected=unexpected,
        wrong=wrong,
    )
