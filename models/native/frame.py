"""The function that XLA calls, as LLVM assembly: what it is asked, and where its operands lie."""

from collections.abc import Sequence

from .header import Header

_SHARED = """
; An int32 as a number from 0 to the highest allowed.
define internal i64 @clipped(ptr %numbers, i64 %place, i64 %most) alwaysinline {
  %at = getelementptr i32, ptr %numbers, i64 %place
  %given = load i32, ptr %at
  %wide = sext i32 %given to i64
  %up = call i64 @llvm.smax.i64(i64 %wide, i64 0)
  %clipped = call i64 @llvm.smin.i64(i64 %up, i64 %most)
  ret i64 %clipped
}
; Zeros in the rows behind the live ones.
define internal void @cleared(ptr %c, i64 %live, i64 %rows, i64 %width) alwaysinline {
  %behind = sub i64 %rows, %live
  %filled = mul i64 %live, %width
  %unfilled = mul i64 %behind, %width
  %at = getelementptr float, ptr %c, i64 %filled
  %bytes = mul i64 %unfilled, 4
  call void @llvm.memset.p0.i64(ptr %at, i8 0, i64 %bytes, i1 false)
  ret void
}"""


def handler(header: Header, name: str, operands: Sequence[str], body: str) -> str:
    """A handler of XLA's foreign-function interface.

    Args:
        header: of the interface.
        name: of the function.
        operands: names of the arguments and, last, of the only result. `%NAME.data` is where its numbers lie,
            `%NAME.dims` where its sizes do, each an i64.
        body: what follows, with `%api` and `%ctx`; ends with a return of a null pointer. A module has one
            handler, and all its functions may call `@clipped` and `@cleared`.
    """
    at = header.at
    arguments = [_load(one, "ptr", "%args", 8 * place) for place, one in enumerate(operands[:-1])]
    parts = [
        _load(f"{one}.{part}", "ptr", f"%{one}", at(f"Buffer.{part}"))
        for one in operands
        for part in ("data", "dims")
    ]
    # XLA asks for the version once, when the handler is registered.
    version = at("Metadata.api_version")
    lines = [
        _SHARED,
        f"define ptr @{name}(ptr %frame) {{",
        "entry:",
        _load("ext", "ptr", "%frame", at("CallFrame.extension_start")),
        "  %plain = icmp eq ptr %ext, null",
        "  br i1 %plain, label %run, label %asked",
        "asked:",
        _load("kind", "i32", "%ext", at(f"{_extension(header)}.type")),
        f"  %about = icmp eq i32 %kind, {header.value('Extension_Metadata')}",
        "  br i1 %about, label %tell, label %run",
        "tell:",
        _load("meta", "ptr", "%ext", at("Metadata_Extension.metadata")),
        _store(str(header.version[0]), "%meta", version + at("Api_Version.major_version"), "major"),
        _store(str(header.version[1]), "%meta", version + at("Api_Version.minor_version"), "minor"),
        _store("0", "%meta", at("Metadata.traits"), "traits"),
        "  ret ptr null",
        "run:",
        _load("api", "ptr", "%frame", at("CallFrame.api")),
        _load("ctx", "ptr", "%frame", at("CallFrame.ctx")),
        _load("args", "ptr", "%frame", at("CallFrame.args") + at("Args.args")),
        _load("rets", "ptr", "%frame", at("CallFrame.rets") + at("Rets.rets")),
        *arguments,
        _load(operands[-1], "ptr", "%rets", 0),
        *parts,
        body,
        "}",
    ]
    return "\n".join(lines)


def size(name: str, operand: str, axis: int) -> str:
    """The size of an axis of an operand, as `%NAME`."""
    return _load(name, "i64", f"%{operand}.dims", 8 * axis)


def _load(name: str, kind: str, base: str, offset: int) -> str:
    return (
        f"  %at.{name} = getelementptr i8, ptr {base}, i64 {offset}\n  %{name} = load {kind}, ptr %at.{name}"
    )


def _store(value: str, base: str, offset: int, name: str) -> str:
    return f"  %{name} = getelementptr i8, ptr {base}, i64 {offset}\n  store i32 {value}, ptr %{name}"


def _extension(header: Header) -> str:
    """The struct's name, which changed with version 0.5 of the interface."""
    return "InternalExtension" if "InternalExtension" in header.structs else "Extension_Base"
