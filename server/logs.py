"""Logs through the standard library: text or JSON, a line each, with the ids of the call in hand."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from .context import CALL

CHANGES = logging.getLogger("servax.changes")
"""Tells when what is served changed, rare and by somebody's wish: shown at the default level, `warning`."""

# What every record has; anything else was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the ids of the call, and what `extra` gave."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _call_fields() | _extras(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line for people, the same facts as `key=value` behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line before a traceback."""
        fields = _call_fields() | _extras(record)
        return super().formatMessage(record) + "".join(f" {key}={value}" for key, value in fields.items())


def _call_fields() -> dict[str, Any]:
    call = CALL.get()
    if call is None:
        return {}
    fields: dict[str, Any] = {"request_id": call.request_id}
    if call.trace is not None:
        fields |= {"trace_id": call.trace.trace_id, "span_id": call.trace.span_id}
        fields |= {"parent_id": call.trace.parent_id}
    return fields


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def set_up_logs(level: str, how: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send the logs of servax, uvicorn and whatever warns to one stream; called by the command line only.

    Args:
        level: `critical` to `debug`.
        how: `text` or `json`.
        stream: by default stderr.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if how == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("servax", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    chosen = logging.getLogger("servax").level
    CHANGES.setLevel(min(chosen, logging.INFO) if chosen <= logging.WARNING else chosen)
    logging.captureWarnings(True)
