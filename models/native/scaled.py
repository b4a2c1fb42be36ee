"""What becomes of a tile's exact sums: float32, as LLVM assembly.

A row of activations has an integer that stands for 0 and a step, a column of the matrix the sum of its values
and a scale, and a product is `(sum - zero * sums) * step * scale`, rounded as written. The kernel does so
before it stores the sums: as passes of XLA's over the product it is a quarter of a step of SmolLM2.
"""

from collections.abc import Iterator

from .target import Tile
from .vectors import spread, vector

_OF_ROWS = ("zeros", "steps")
_OF_COLUMNS = ("sums", "scales")
OPERANDS = (*_OF_ROWS, *_OF_COLUMNS)


def of_panel() -> str:
    """Pointers to what belongs to a panel whose first column is `%column`."""
    return "\n".join(
        f"  %{name}.here = getelementptr float, ptr %{name}, i64 %column" for name in _OF_COLUMNS
    )


def of_rows() -> str:
    """Pointers to what belongs to a tile whose first row is `%r`."""
    return "\n".join(f"  %{name}.here = getelementptr float, ptr %{name}, i64 %r" for name in _OF_ROWS)


def of_layer(tile: Tile) -> str:
    """Pointers to what belongs to the layer `%layer` of `%panels` panels."""
    lines = [f"  %columns = mul i64 %panels, {tile.width}", "  %before = mul i64 %columns, %layer"]
    lines += [f"  %layer.{name} = getelementptr float, ptr %{name}.data, i64 %before" for name in _OF_COLUMNS]
    return "\n".join(lines)


def fields() -> dict[str, str]:
    """Those pointers, and those of all rows, as fields of a job."""
    return {name: f"ptr %{name}.data" for name in _OF_ROWS} | {
        name: f"ptr %layer.{name}" for name in _OF_COLUMNS
    }


def ended(tile: Tile, rows: int) -> Iterator[str]:
    """From the sums `%n` of a tile the numbers `%y`."""
    whole, floats = vector(tile, "i32"), vector(tile)
    for j in range(tile.vectors):
        for name, kind in zip(_OF_COLUMNS, (whole, floats), strict=True):
            yield f"  %{name}.at{j} = getelementptr {kind}, ptr %{name}, i64 {j}"
            yield f"  %{name}{j} = load {kind}, ptr %{name}.at{j}, align 4"
    for i in range(rows):
        for name, kind in zip(_OF_ROWS, ("i32", "float"), strict=True):
            yield f"  %{name}.at{i} = getelementptr {kind}, ptr %{name}, i64 {i}"
            yield f"  %{name}.one{i} = load {kind}, ptr %{name}.at{i}, align 4"
            yield spread(tile, f"{name}{i}", f"%{name}.one{i}", kind)
        for j in range(tile.vectors):
            cell = f"{i}_{j}"
            yield f"  %off{cell} = mul {whole} %zeros{i}, %sums{j}"
            yield f"  %exact{cell} = sub {whole} %n{cell}, %off{cell}"
            yield f"  %wide{cell} = sitofp {whole} %exact{cell} to {floats}"
            yield f"  %part{cell} = fmul {floats} %wide{cell}, %steps{i}"
            yield f"  %y{cell} = fmul {floats} %part{cell}, %scales{j}"
