import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servax.bucketing import Bucket
from servax.experiments.cost_table import AXES, CostTable, LinearCost, cached, default_buckets
from servax.experiments.errors import ExperimentError
from servax.experiments.reporting import machine, write_json


def bucket(batch: int, length: int) -> Bucket:
    return Bucket(AXES, (batch, length))


SECONDS = {bucket(1, 16): 2.0, bucket(1, 64): 6.0, bucket(4, 16): 4.0, bucket(4, 32): 9.0, bucket(4, 64): 8.0}
TABLE = CostTable(SECONDS, dict.fromkeys(SECONDS, 0.5), {"cores": 1})


def test_measured_buckets_are_kept_and_made_monotone() -> None:
    assert TABLE(bucket(1, 16)) == 2.0
    assert TABLE(bucket(4, 32)) == 9.0
    assert TABLE(bucket(4, 64)) == 9.0  # measured at 8, but it holds 4x32


def test_between_and_beyond() -> None:
    assert TABLE(bucket(1, 40)) == pytest.approx(4.0)
    assert TABLE(bucket(2, 16)) == pytest.approx(2 + 2 / 3)
    assert TABLE(bucket(1, 8)) == 2.0
    assert TABLE(bucket(1, 128)) == pytest.approx(12.0)
    assert TABLE(bucket(8, 16)) == pytest.approx(8.0)


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 5), st.integers(0, 50))
def test_a_larger_bucket_is_never_cheaper(batch: int, length: int, more: int, longer: int) -> None:
    assert TABLE(bucket(batch, length)) <= TABLE(bucket(batch + more, length + longer)) + 1e-12


def test_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_json(file, TABLE.to_dict())
    again = CostTable.from_dict(json.loads(file.read_text()))
    assert (again.seconds, again.compile_s, again.made_on) == (TABLE.seconds, TABLE.compile_s, TABLE.made_on)
    with pytest.raises(ExperimentError, match="what to_dict"):
        CostTable.from_dict({"buckets": [{}]})
    with pytest.raises(ExperimentError, match="times above 0"):
        CostTable({bucket(1, 1): 0.0}, {}, {})


def test_a_cached_table_of_this_machine_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    wanted = default_buckets()
    own = CostTable(dict.fromkeys(wanted, 1.0), dict.fromkeys(wanted, 1.0), machine())
    write_json(file, own.to_dict())
    assert cached(file, buckets=wanted[:3]).seconds == own.seconds


def test_the_prior_is_linear_in_tokens() -> None:
    prior = LinearCost(0.1, 0.01)
    assert prior(bucket(2, 50)) == pytest.approx(1.1)
