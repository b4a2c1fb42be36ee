"""How commands end: exit codes, errors as one line, tracebacks only for those who ask.

Codes: 0 done; 1 unexpected error; 2 wrong usage; 3 the model, the store or the address cannot be used as
configured; 4 the work itself failed: a warm-up, a check, a server that does not answer; 130 interrupted;
143 ended by SIGTERM.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

from ...bucketing import BucketingError
from ..errors import ConfigError, ServerError

EXIT_UNEXPECTED, EXIT_USAGE, EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
HELP = (
    "Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 cannot be used as configured, 4 failed, "
    "130 interrupted, 143 ended by SIGTERM (serve drains first; a signal a second later ends it)."
)
DEBUG: ContextVar[bool] = ContextVar("servax_debug", default=False)

T = TypeVar("T")


class UsageError(Exception):
    """A command line that cannot be understood."""


def exit_code(error: BaseException) -> int:
    """The exit code that tells what went wrong."""
    if isinstance(error, UsageError | BucketingError):
        return EXIT_USAGE
    if isinstance(error, ConfigError | OSError | ImportError):
        return EXIT_CONFIG
    from ...jit_cache import JitCacheError, StoreError

    if isinstance(error, StoreError):
        return EXIT_CONFIG
    return EXIT_FAILED if isinstance(error, JitCacheError | ServerError) else EXIT_UNEXPECTED


def guarded(
    action: Callable[[], T], *, code_of: Callable[[BaseException], int] = exit_code, traceback: bool = False
) -> T:
    """Do the work of a command; an error is one line on stderr and an exit code.

    Args:
        action: the work.
        code_of: the exit code of an error.
        traceback: whether an error is raised as it is; so it is too after `--debug`.

    Raises:
        typer.Exit: the work failed.
    """
    try:
        return action()
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if traceback or DEBUG.get():
            raise
        code = code_of(error)
        show(error, hint=code == EXIT_UNEXPECTED)
        raise typer.Exit(code) from None


class ErrorConsole(Console):
    """Standard error, which is let go where nobody reads it any more: rich would end the process."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does, but for a terminal that is gone."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """What is written from now on goes nowhere, the log too."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)


def leave(code: str | int | None) -> None:
    """End the process at once if a thread of ours is still at work.

    One that is in native code, such as a compile that nobody waits for any more, would abort the
    interpreter's own end, whatever the exit code was to be.
    """
    if any(thread.name.startswith("servax-") for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def show(error: BaseException, *, hint: bool = False) -> None:
    """An error as one line on stderr, in red where there are colours."""
    text = str(error) or type(error).__name__
    if hint:
        text = f"{type(error).__name__}: {text} (servax --debug shows where)" if str(error) else text
    say(f"error: {text}", style="red")


def fail(message: str, code: int) -> NoReturn:
    """Print a message and leave."""
    say(f"error: {message}", style="red")
    raise typer.Exit(code)


def say(text: str, style: str | None = None) -> None:
    """A line on stderr, as it is: no markup, no highlighting, no line breaks of ours."""
    ErrorConsole().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
