"""What the command line shows on stderr: a progress bar with ETA, plain lines where there is no terminal."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


class Step(Protocol):
    """One step of a warm-up."""

    @property
    def bucket(self) -> Any: ...  # noqa: D102
    @property
    def done(self) -> int: ...  # noqa: D102
    @property
    def total(self) -> int: ...  # noqa: D102
    @property
    def elapsed_s(self) -> float: ...  # noqa: D102
    @property
    def error(self) -> str | None: ...  # noqa: D102


class WarmupView:
    """Shows warm-up steps; called from the warm-up thread."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[bucket]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, model: str, step: Step) -> None:
        """One more bucket of a model is done."""
        if step.error is not None:
            self._console.print(
                f"{model}: bucket {step.bucket} failed: {step.error}",
                style="red",
                markup=False,
                soft_wrap=True,
            )
        if not self._console.is_terminal:
            if step.done == step.total or step.done % max(1, step.total // 10) == 0:
                line = f"{model}: {step.done} of {step.total} programs done after {step.elapsed_s:.1f} s"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        if model not in self._tasks:
            self._progress.start()
            self._tasks[model] = self._progress.add_task(f"warming {model}", total=step.total, bucket="")
        self._progress.update(self._tasks[model], completed=step.done, bucket=str(step.bucket))
        if step.done == step.total:
            self.close()

    def show_plan(self, model: str, plan: Any) -> None:
        """The memory plan of a model, before anything is allocated."""
        self._console.print(f"{model}: {plan.explain()}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._progress.stop()


def warm_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The programs of a warm-up as a table."""
    table = Table(title="programs")
    for heading in ("model", "bucket", "from"):
        table.add_column(heading)
    for heading in ("ready s", "compile s", "run ms", "code kB", "scratch MB"):
        table.add_column(heading, justify="right")
    failed = any(row["error"] is not None for row in rows)
    if failed:
        table.add_column("error", overflow="fold")
    for row in rows:
        if row["error"] is not None:
            table.add_row(row["model"], row["bucket"], "", "", "", "", "", "", row["error"])
            continue
        table.add_row(
            row["model"],
            row["bucket"],
            row["source"],
            f"{row['ready_s']:.2f}",
            f"{row['compile_s']:.2f}",
            f"{row['run_ms']:.2f}",
            f"{row['code_bytes'] / 1e3:.0f}",
            f"{row['temp_bytes'] / 1e6:.1f}",
        )
    return table
