"""Sums of products in registers, added to what is there, and reductions of vectors, as LLVM assembly."""

from collections.abc import Iterator

from .target import Tile

# Vectors of a row of `b` whose sums are in registers for a few rows of `a`.
_VECTORS = 4


def source(tile: Tile, kind: str) -> str:
    """`@multiply`, whose `b` is of LLVM's type `kind`, and `@highest`, `@sum`, `@exp1` and `@higher`.

    They need `@exponential`.
    """
    counts = range(1, rows(tile) + 1)
    tiles = [_tile(tile, kind, count, vectors) for vectors in (1, _VECTORS) for count in counts]
    return "\n".join([*_declarations(tile), _single(tile), *_reductions(tile), *tiles, _multiply(tile, kind)])


def rows(tile: Tile) -> int:
    """Rows of `a` that `@multiply` takes: 16 of 32 registers hold their sums, or 12 of 16."""
    return 3 if tile.lanes == 8 else 4


def vector(tile: Tile, kind: str = "float") -> str:
    """LLVM's name of a register's type."""
    return f"<{tile.lanes} x {kind}>"


def spread(tile: Tile, name: str, scalar: str) -> str:
    """A vector `%NAME` of one number."""
    floats = vector(tile)
    return (
        f"  %{name}.0 = insertelement {floats} poison, float {scalar}, i64 0\n"
        f"  %{name} = shufflevector {floats} %{name}.0, {floats} poison, <{tile.lanes} x i32> zeroinitializer"
    )


def _declarations(tile: Tile) -> list[str]:
    floats = vector(tile)
    return [
        f"declare {floats} @llvm.fma.v{tile.lanes}f32({floats}, {floats}, {floats})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]


def _single(tile: Tile) -> str:
    """exp of one number, and the higher of two."""
    floats = vector(tile)
    return f"""
define internal float @exp1(float %x) alwaysinline {{
{spread(tile, "v", "%x")}
  %e = call {floats} @exponential({floats} %v)
  %y = extractelement {floats} %e, i64 0
  ret float %y
}}
define internal float @higher(float %a, float %b) alwaysinline {{
  %more = fcmp ogt float %a, %b
  %y = select i1 %more, float %a, float %b
  ret float %y
}}"""


def _reductions(tile: Tile) -> Iterator[str]:
    """The highest of a vector's numbers, and their sum, halves to halves."""
    floats = vector(tile)
    for name in ("highest", "sum"):
        lines, half, at = [], tile.lanes // 2, "%x"
        while half:
            mask = ", ".join(f"i32 {(i + half) % tile.lanes}" for i in range(tile.lanes))
            lines.append(
                f"  %s{half} = shufflevector {floats} {at}, {floats} poison, <{tile.lanes} x i32> <{mask}>"
            )
            if name == "sum":
                lines.append(f"  %h{half} = fadd {floats} {at}, %s{half}")
            else:
                lines.append(f"  %c{half} = fcmp ogt {floats} {at}, %s{half}")
                lines.append(
                    f"  %h{half} = select <{tile.lanes} x i1> %c{half}, {floats} {at}, {floats} %s{half}"
                )
            half, at = half // 2, f"%h{half}"
        body = "\n".join(lines)
        yield f"""
define internal float @{name}({floats} %x) alwaysinline {{
{body}
  %y = extractelement {floats} {at}, i64 0
  ret float %y
}}"""


def _tile(tile: Tile, kind: str, count: int, vectors: int) -> str:
    """`count` rows of `a` times `vectors` vectors of the rows of `b`, added to `c`; sums run in order."""
    floats, cells = vector(tile), [(i, j) for i in range(count) for j in range(vectors)]
    starts = [
        f"  %{side}o{i} = mul i64 %ld{side}, {i}\n"
        f"  %{side}{i} = getelementptr float, ptr %{side}, i64 %{side}o{i}"
        for side in "ac"
        for i in range(count)
    ]
    before = [
        f"  %d{i}_{j} = getelementptr {floats}, ptr %c{i}, i64 {j}\n"
        f"  %c{i}_{j} = load {floats}, ptr %d{i}_{j}, align 4"
        for i, j in cells
    ]
    sums = [f"  %s{i}_{j} = phi {floats} [%c{i}_{j}, %entry], [%n{i}_{j}, %loop]" for i, j in cells]
    load = [
        f"  %p{j} = getelementptr {vector(tile, kind)}, ptr %row, i64 {j}\n"
        f"  %{'b' if kind == 'float' else 'l'}{j} = load {vector(tile, kind)}, ptr %p{j}, align 2"
        for j in range(vectors)
    ]
    if kind != "float":
        load += [f"  %b{j} = fpext {vector(tile, kind)} %l{j} to {floats}" for j in range(vectors)]
    load += [
        f"  %far{j} = getelementptr i8, ptr %p{j}, i64 %ahead\n"
        f"  call void @llvm.prefetch.p0(ptr %far{j}, i32 0, i32 3, i32 1)"
        for j in range(vectors)
    ]
    work = []
    for i in range(count):
        work += [
            f"  %x{i} = getelementptr float, ptr %a{i}, i64 %k\n  %f{i} = load float, ptr %x{i}",
            spread(tile, f"v{i}", f"%f{i}"),
        ]
        work += [
            f"  %n{i}_{j} = call {floats} @llvm.fma.v{tile.lanes}f32"
            f"({floats} %v{i}, {floats} %b{j}, {floats} %s{i}_{j})"
            for j in range(vectors)
        ]
    after = [f"  store {floats} %n{i}_{j}, ptr %d{i}_{j}, align 4" for i, j in cells]
    lines = [
        f"define internal void @tile{count}x{vectors}"
        "(ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, i64 %depth, i64 %ahead) {",
        "entry:", *starts, *before, "  br label %loop",
        "loop:", "  %k = phi i64 [0, %entry], [%k1, %loop]", *sums,
        "  %place = mul i64 %k, %ldb", f"  %row = getelementptr {kind}, ptr %b, i64 %place", *load, *work,
        "  %k1 = add i64 %k, 1", "  %more = icmp slt i64 %k1, %depth",
        "  br i1 %more, label %loop, label %end",
        "end:", *after, "  ret void", "}",
    ]  # fmt: skip
    return "\n".join(lines)


def _multiply(tile: Tile, kind: str) -> str:
    """Add `a`, `(count, depth)`, times `b`, `(depth, columns)`, to `c`, whose rows are `ld` floats apart.

    What lies `ahead` bytes from `b` is fetched meanwhile: hardware does so to the end of 4096 bytes only. It
    makes reads from memory 1.2 (float) to 3 (half) times as fast.
    """
    arguments = "ptr %a, i64 %lda, ptr %bc, i64 %ldb, ptr %cc, i64 %ldc, i64 %depth, i64 %ahead"

    def step(name: str, vectors: int) -> str:
        last = rows(tile)
        cases = " ".join(f"i64 {count}, label %{name}{count}" for count in range(1, last))
        calls = "\n".join(
            f"{name}{count}:\n  call void @tile{count}x{vectors}({arguments})\n  br label %next"
            for count in range(1, last + 1)
        )
        return f"{name}:\n  switch i64 %count, label %{name}{last} [{cases}]\n{calls}"

    return f"""
define internal void @multiply(i64 %count, ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc,
                               i64 %depth, i64 %columns, i64 %ahead) {{
entry:
  br label %strip
strip:
  %j = phi i64 [0, %entry], [%j1, %next]
  %bc = getelementptr {kind}, ptr %b, i64 %j
  %cc = getelementptr float, ptr %c, i64 %j
  %left = sub i64 %columns, %j
  %much = icmp sge i64 %left, {_VECTORS * tile.lanes}
  %step = select i1 %much, i64 {_VECTORS * tile.lanes}, i64 {tile.lanes}
  br i1 %much, label %wide, label %narrow
{step("wide", _VECTORS)}
{step("narrow", 1)}
next:
  %j1 = add i64 %j, %step
  %more = icmp slt i64 %j1, %columns
  br i1 %more, label %strip, label %end
end:
  ret void
}}"""
