"""The published schema against a generator of requests: what it says is what the server does."""

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis", reason="fuzzing by the schema needs schemathesis")
positive_data_acceptance = pytest.importorskip("schemathesis.specs.openapi.checks").positive_data_acceptance


def test_the_server_keeps_its_schema(site: Any) -> None:
    """Every operation, with valid and invalid input: statuses, bodies and headers are those of the schema."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", site.app)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 15
    broken = {}
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            try:
                _try(operation, mode)
            except schemathesis.core.failures.FailureGroup as group:
                broken[f"{operation.label} {mode.name}"] = "\n".join(map(repr, group.exceptions))
    assert not broken, "\n\n".join(f"{name}: {text}" for name, text in broken.items())
    site.check_healthy()


def _try(operation: Any, mode: Any) -> None:
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def keeps(case: Any) -> None:
        # No JSON schema can say which datatype, shape and values go together, nor which text is too long.
        excluded = [positive_data_acceptance] if case.method == "POST" else []
        if "name" in case.path_parameters:
            case.path_parameters["name"] = "double"
        if mode.is_positive and case.path.endswith("embeddings"):
            case.body["model"] = "toy"
        case.call_and_validate(excluded_checks=excluded)

    with contextlib.suppress(Unsatisfiable):  # no wrong input exists where there is none at all
        keeps()
