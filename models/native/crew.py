"""One job for several threads, those of XLA's own pool, as LLVM assembly.

The caller hires helpers; all claim units of work until there are none, and the caller waits for the units
that helpers have begun. A helper that starts late finds nothing left, and the last to leave frees the job.
"""

import ctypes
import sys
from collections.abc import Sequence

from .header import Header
from .target import Tile

# What every job begins with: units claimed, units done, who still holds it, how many units there are, how
# many are claimed at a time, and the function `(job, from, to)` that does them.
_COMMON = ("next", "done", "users", "units", "step", "function", "core")
# Turns of the waiting loop before a waiting thread offers its core to others.
_TURNS = 1 << 12
# Claims of each thread, were all as fast: small enough to end together, large enough to read on in order.
_CLAIMS = 8
# Bytes of a set of cores: the size that the C library's own has.
_MASK = 128


class Job:
    """Where the fields of a job lie, eight bytes each.

    Attributes:
        names: of the fields that are not common to all jobs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._all = _COMMON + self.names

    def made(self, units: str, function: str, values: dict[str, str], *, job: str = "job") -> str:
        """A new job as `%JOB`; `values` are LLVM operands with their types, by name of the field."""
        fixed = {"next": "i64 0", "done": "i64 0", "users": "i64 1", "units": f"i64 {units}", "core": "i64 -1"}
        lines = [f"  %{job} = call ptr @malloc(i64 {8 * len(self._all)})"]
        for name, value in {**fixed, "function": f"ptr {function}", **values}.items():
            lines += [self._at(name, f"{job}.made", job), f"  store {value}, ptr %{job}.made.{name}"]
        return "\n".join(lines)

    def loaded(self, pointers: Sequence[str]) -> str:
        """Every field of its own, as a name; those in `pointers` as pointers."""
        lines = []
        for name in self.names:
            kind = "ptr" if name in pointers else "i64"
            lines += [self._at(name, "at"), f"  %{name} = load {kind}, ptr %at.{name}"]
        return "\n".join(lines)

    def _at(self, name: str, prefix: str, job: str = "job") -> str:
        return f"  %{prefix}.{name} = getelementptr i64, ptr %{job}, i64 {self._all.index(name)}"


def source(header: Header, tile: Tile) -> str:
    """`@run(api, ctx, job, most)`: do a job with up to `most` threads, and let go of it."""
    parts = [_DECLARED, tile.pause[1], _ASIDE if _placed() else _ANYWHERE, _WORK]
    return "\n".join([*parts, _forget(header), _run(header, tile)])


def _placed() -> bool:
    """Whether a thread can tell its core and leave it."""
    library = ctypes.CDLL(None)
    names = ("sched_getcpu", "sched_getaffinity", "sched_setaffinity")
    return sys.platform == "linux" and all(hasattr(library, name) for name in names)


_DECLARED = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)"""

_ANYWHERE = """
define internal i64 @core() {
  ret i64 -1
}
define internal void @aside(i64 %core) {
  ret void
}"""

# Linux wakes a thread on the core of who woke it, or where it ran last, even while another core is idle, if
# all of them were busy a while ago. It then takes turns with the caller until it is moved, after about 2 ms.
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

_WORK = """
define internal void @work(ptr %job) {
  %at.done = getelementptr i64, ptr %job, i64 1
  %at.units = getelementptr i64, ptr %job, i64 3
  %at.step = getelementptr i64, ptr %job, i64 4
  %at.function = getelementptr i64, ptr %job, i64 5
  %units = load i64, ptr %at.units
  %step = load i64, ptr %at.step
  %function = load ptr, ptr %at.function
  br label %claim
claim:
  %from = atomicrmw add ptr %job, i64 %step monotonic
  %over = icmp sge i64 %from, %units
  br i1 %over, label %nothing, label %some
some:
  %beyond = add i64 %from, %step
  %to = call i64 @llvm.smin.i64(i64 %beyond, i64 %units)
  call void %function(ptr %job, i64 %from, i64 %to)
  %count = sub i64 %to, %from
  %before = atomicrmw add ptr %at.done, i64 %count release
  br label %claim
nothing:
  ret void
}
define internal void @leave(ptr %job) {
  %at.users = getelementptr i64, ptr %job, i64 2
  %users = atomicrmw sub ptr %at.users, i64 1 acq_rel
  %last = icmp eq i64 %users, 1
  br i1 %last, label %end, label %out
end:
  call void @free(ptr %job)
  br label %out
out:
  ret void
}
define internal void @help(ptr %job) {
  %at.core = getelementptr i64, ptr %job, i64 6
  %core = load i64, ptr %at.core
  call void @aside(i64 %core)
  call void @work(ptr %job)
  call void @leave(ptr %job)
  ret void
}"""


def call(header: Header, name: str, function: str, values: dict[str, str]) -> str:
    """Call a function of the interface, whose arguments are a struct: `%FUNCTION.gave` is what it gave.

    Args:
        header: of the interface.
        name: of the function, whose struct is `{name}_Args`.
        function: a prefix for names here.
        values: LLVM operands with their types, by name of the field.
    """
    size = header.size(f"{name}_Args")
    lines = [f"  %{function} = alloca [{size} x i8], align 8"]
    for field, value in {
        "struct_size": f"i64 {size}",
        "extension_start": "ptr null",
        **values,
    }.items():
        place = header.at(f"{name}_Args.{field}")
        lines += [
            f"  %{function}.{field} = getelementptr i8, ptr %{function}, i64 {place}",
            f"  store {value}, ptr %{function}.{field}",
        ]
    lines += [
        f"  %{function}.at = getelementptr i8, ptr %api, i64 {header.at(f'Api.{name}')}",
        f"  %{function}.code = load ptr, ptr %{function}.at",
        f"  %{function}.gave = call ptr %{function}.code(ptr %{function})",
    ]
    return "\n".join(lines)


def _forget(header: Header) -> str:
    """Destroy an error that a call of the interface gave, of which the caller is the owner."""
    return f"""
define internal void @forget(ptr %api, ptr %error) {{
  %none = icmp eq ptr %error, null
  br i1 %none, label %end, label %some
some:
{call(header, "Error_Destroy", "destroy", {"error": "ptr %error"})}
  br label %end
end:
  ret void
}}"""


def _run(header: Header, tile: Tile) -> str:
    count = call(header, "ThreadPool_NumThreads", "ask", {"ctx": "ptr %ctx", "num_threads": "ptr %threads"})
    fields = {"ctx": "ptr %ctx", "task": "ptr @help", "data": "ptr %job"}
    return f"""
define internal void @run(ptr %api, ptr %ctx, ptr %job, i64 %most) {{
entry:
  %at.done = getelementptr i64, ptr %job, i64 1
  %at.users = getelementptr i64, ptr %job, i64 2
  %at.units = getelementptr i64, ptr %job, i64 3
  %at.step = getelementptr i64, ptr %job, i64 4
  %units = load i64, ptr %at.units
  %threads = alloca i64
  store i64 1, ptr %threads
{count}
  call void @forget(ptr %api, ptr %ask.gave)
  %pool = load i64, ptr %threads
  %few = call i64 @llvm.smin.i64(i64 %most, i64 %units)
  %crew.most = call i64 @llvm.smin.i64(i64 %few, i64 %pool)
  %crew = call i64 @llvm.smax.i64(i64 %crew.most, i64 1)
  %claims = mul i64 %crew, {_CLAIMS}
  %step.down = udiv i64 %units, %claims
  %step = call i64 @llvm.smax.i64(i64 %step.down, i64 1)
  store i64 %step, ptr %at.step
  %at.core = getelementptr i64, ptr %job, i64 6
  %core = call i64 @core()
  store i64 %core, ptr %at.core
  br label %helpers
helpers:
  %h = phi i64 [1, %entry], [%h1, %hired]
  %h.more = icmp slt i64 %h, %crew
  br i1 %h.more, label %hire, label %own
hire:
  %joined = atomicrmw add ptr %at.users, i64 1 monotonic
  %refused = call ptr @schedule(ptr %api, ptr %ctx, ptr %job)
  %fine = icmp eq ptr %refused, null
  br i1 %fine, label %hired, label %alone
alone:
  %back = atomicrmw sub ptr %at.users, i64 1 monotonic
  call void @forget(ptr %api, ptr %refused)
  br label %own
hired:
  %h1 = add i64 %h, 1
  br label %helpers
own:
  call void @work(ptr %job)
  br label %wait
wait:
  %turn = phi i64 [0, %own], [%turn1, %again]
  %done = load atomic i64, ptr %at.done acquire, align 8
  %all = icmp sge i64 %done, %units
  br i1 %all, label %end, label %pause
pause:
  {tile.pause[0]}
  %turn1 = add i64 %turn, 1
  %turn.part = and i64 %turn1, {_TURNS - 1}
  %long = icmp eq i64 %turn.part, 0
  br i1 %long, label %offer, label %again
offer:
  %offered = call i32 @sched_yield()
  br label %again
again:
  br label %wait
end:
  call void @leave(ptr %job)
  ret void
}}
define internal ptr @schedule(ptr %api, ptr %ctx, ptr %job) {{
{call(header, "ThreadPool_Schedule", "ask", fields)}
  ret ptr %ask.gave
}}"""
