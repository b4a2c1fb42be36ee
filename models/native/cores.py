"""Which core a thread runs on, and how it leaves it to another, as LLVM assembly.

A thread may be woken on the core of who woke it, or where it ran last, while another core is idle (seen on
Linux 6.18 in a virtual machine). It then takes turns with the caller until the system moves it, after about
2 ms.
"""

import ctypes
import sys

# Bytes of a set of cores: the size that the C library's own has.
_MASK = 128


def source() -> str:
    """`@core()`, -1 if that is not told, and `@aside(core)`: go elsewhere if the caller is on that core."""
    return _ASIDE if _placed() else _ANYWHERE


def _placed() -> bool:
    """Whether a thread can tell its core and leave it."""
    names = ("sched_getcpu", "sched_getaffinity", "sched_setaffinity")
    return sys.platform == "linux" and all(hasattr(ctypes.CDLL(None), name) for name in names)


_ANYWHERE = """
define internal i64 @core() {
  ret i64 -1
}
define internal void @aside(i64 %core) {
  ret void
}"""

_ASIDE = f"""
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
define internal i64 @core() {{
  %core = call i32 @sched_getcpu()
  %wide = sext i32 %core to i64
  ret i64 %wide
}}
; Leave a core to another thread, if one is there: by asking for any other core of those allowed.
define internal void @aside(i64 %core) {{
entry:
  %mine = call i64 @core()
  %same = icmp eq i64 %mine, %core
  %known = icmp ult i64 %core, {8 * _MASK}
  %go = and i1 %same, %known
  br i1 %go, label %ask, label %stay
ask:
  %allowed = alloca [{_MASK} x i8], align 8
  %others = alloca [{_MASK} x i8], align 8
  %asked = call i32 @sched_getaffinity(i32 0, i64 {_MASK}, ptr %allowed)
  %told = icmp eq i32 %asked, 0
  br i1 %told, label %copy, label %stay
copy:
  %i = phi i64 [0, %ask], [%i1, %copy]
  %any = phi i64 [0, %ask], [%any1, %copy]
  %from = getelementptr i64, ptr %allowed, i64 %i
  %to = getelementptr i64, ptr %others, i64 %i
  %word = load i64, ptr %from
  %first = mul i64 %i, 64
  %place = sub i64 %core, %first
  %in = icmp ult i64 %place, 64
  %shift = select i1 %in, i64 %place, i64 0
  %bit = shl i64 1, %shift
  %not = xor i64 %bit, -1
  %kept = and i64 %word, %not
  %rest = select i1 %in, i64 %kept, i64 %word
  store i64 %rest, ptr %to
  %any1 = or i64 %any, %rest
  %i1 = add i64 %i, 1
  %more = icmp slt i64 %i1, {_MASK // 8}
  br i1 %more, label %copy, label %copied
copied:
  %none = icmp eq i64 %any1, 0
  br i1 %none, label %stay, label %move
move:
  %moved = call i32 @sched_setaffinity(i32 0, i64 {_MASK}, ptr %others)
  %back = call i32 @sched_setaffinity(i32 0, i64 {_MASK}, ptr %allowed)
  br label %stay
stay:
  ret void
}}"""
