"""Events of programs as the log tells them."""

import logging

import pytest
from servax.server.events import Events, ProgramEvent


def test_a_fault_of_the_model_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    with caplog.at_level(logging.INFO, logger="servax.programs"):
        for model, bucket in (("a", "1x8"), ("a", "2x8"), ("b", "1x8")):
            events.add(ProgramEvent("warmup", "", 0.0, "", model, bucket, error=f"bucket {bucket} failed"))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING"], "once for each model"
    assert len(events.listed()) == 3
