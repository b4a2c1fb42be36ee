"""Products of a few rows with some columns, whose sums stay in registers, as LLVM assembly."""

from collections.abc import Iterator
from typing import NamedTuple

from .target import Tile
from .vectors import fma, spread, vector


class Product(NamedTuple):
    """How `a` is multiplied by `b`.

    Attributes:
        tile: of this machine, for its `lanes`.
        rows: of `a` at most; `rows * vectors` sums, `vectors` of `b` and one number of `a` are in registers.
        vectors: of a row of `b` that are taken at once, or one where fewer are left.
        kind: LLVM's name of the type of `b`, `float` or `half`.
        adds: whether products are added to what is in `c`, and what is needed next is fetched meanwhile:
            hardware does so to the end of 4096 bytes only. It makes reads from memory 1.2 (float) to 3 (half)
            times as fast.
    """

    tile: Tile
    rows: int
    vectors: int
    kind: str = "float"
    adds: bool = False

    @property
    def arguments(self) -> str:
        """Of a tile."""
        ahead = ", i64 %ahead" if self.adds else ""
        return f"ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, i64 %depth{ahead}"


def source(product: Product) -> str:
    """`@multiply(count, a, lda, b, ldb, c, ldc, depth, columns)`: `c` becomes `a` times `b`.

    `a` is `(count, depth)`, `b` `(depth, columns)` and `c` `(count, columns)`, with as many numbers from one
    row to the next as the `ld` of each says, and all but `b` of float32; `count` is 1 to `product.rows`, and
    columns are whole vectors. A product that adds takes one more, `ahead`: how many bytes behind a number of
    `b` lies what is fetched meanwhile.
    """
    widths = (product.vectors, 1)
    tiles = [_tile(product, rows, width) for width in widths for rows in range(1, product.rows + 1)]
    choices = [choice(f"few{width}", product.rows, f"few{width}_", product.arguments) for width in widths]
    return "\n".join([*tiles, *choices, _multiply(product)])


def choice(name: str, last: int, each: str, given: str) -> str:
    """`@NAME(count, ...)`, which calls the function for that many rows, `@EACH1` to that of the last."""
    cases = " ".join(f"i64 {rows}, label %rows{rows}" for rows in range(1, last))
    calls = "\n".join(
        f"rows{rows}:\n  call void @{each}{rows}({given})\n  ret void" for rows in range(1, last + 1)
    )
    return f"""
define internal void @{name}(i64 %count, {given}) {{
  switch i64 %count, label %rows{last} [{cases}]
{calls}
}}"""


def _tile(product: Product, rows: int, vectors: int) -> str:
    """Sums run in the order of `depth`."""
    floats, cells = vector(product.tile), [(i, j) for i in range(rows) for j in range(vectors)]
    before, sums, after = [], [], []
    work = [line for j in range(vectors) for line in _loaded(product, j)]
    for side in "ac":
        for i in range(rows):
            before += [
                f"  %{side}o{i} = mul i64 %ld{side}, {i}",
                f"  %{side}{i} = getelementptr float, ptr %{side}, i64 %{side}o{i}",
            ]
    for i in range(rows):
        work += [f"  %x{i} = getelementptr float, ptr %a{i}, i64 %k", f"  %f{i} = load float, ptr %x{i}"]
        work += [spread(product.tile, f"v{i}", f"%f{i}")]
        work += [fma(product.tile, f"n{i}_{j}", f"%v{i}", f"%b{j}", f"%s{i}_{j}") for j in range(vectors)]
    for i, j in cells:
        before += [f"  %d{i}_{j} = getelementptr {floats}, ptr %c{i}, i64 {j}"]
        if product.adds:
            before += [f"  %c{i}_{j} = load {floats}, ptr %d{i}_{j}, align 4"]
        start = f"%c{i}_{j}" if product.adds else "zeroinitializer"
        sums += [f"  %s{i}_{j} = phi {floats} [{start}, %entry], [%n{i}_{j}, %loop]"]
        after += [f"  store {floats} %n{i}_{j}, ptr %d{i}_{j}, align 4"]
    lines = [
        f"define internal void @few{vectors}_{rows}({product.arguments}) {{",
        "entry:", *before, "  br label %loop",
        "loop:", "  %k = phi i64 [0, %entry], [%k1, %loop]", *sums,
        "  %place = mul i64 %k, %ldb", f"  %row = getelementptr {product.kind}, ptr %b, i64 %place", *work,
        "  %k1 = add i64 %k, 1", "  %more = icmp slt i64 %k1, %depth",
        "  br i1 %more, label %loop, label %end",
        "end:", *after, "  ret void", "}",
    ]  # fmt: skip
    return "\n".join(lines)


def _loaded(product: Product, j: int) -> Iterator[str]:
    """A vector of the row, `%b`."""
    kind = vector(product.tile, product.kind)
    same = product.kind == "float"
    yield f"  %p{j} = getelementptr {kind}, ptr %row, i64 {j}"
    yield f"  %{'b' if same else 'l'}{j} = load {kind}, ptr %p{j}, align 2"
    if not same:
        yield f"  %b{j} = fpext {kind} %l{j} to {vector(product.tile)}"
    if product.adds:
        yield f"  %far{j} = getelementptr i8, ptr %p{j}, i64 %ahead"
        yield f"  call void @llvm.prefetch.p0(ptr %far{j}, i32 0, i32 3, i32 1)"


def _multiply(product: Product) -> str:
    one, given = product.tile.lanes, product.arguments
    many = product.vectors * one
    here = given.replace("%b,", "%bc,").replace("%c,", "%cc,")
    whole = given.replace("i64 %depth", "i64 %depth, i64 %columns")
    return f"""
define internal void @multiply(i64 %count, {whole}) {{
entry:
  br label %strip
strip:
  %j = phi i64 [0, %entry], [%j1, %next]
  %bc = getelementptr {product.kind}, ptr %b, i64 %j
  %cc = getelementptr float, ptr %c, i64 %j
  %left = sub i64 %columns, %j
  %much = icmp sge i64 %left, {many}
  %step = select i1 %much, i64 {many}, i64 {one}
  br i1 %much, label %wide, label %narrow
wide:
  call void @few{product.vectors}(i64 %count, {here})
  br label %next
narrow:
  call void @few1(i64 %count, {here})
  br label %next
next:
  %j1 = add i64 %j, %step
  %more = icmp slt i64 %j1, %columns
  br i1 %more, label %strip, label %end
end:
  ret void
}}"""
