"""A warm server grows by nothing; the full size is an experiment, here a tenth of it."""

from servax.experiments.steady_memory import measure


def test_C8_a_thousand_lengths_hold_eight_programs_and_no_memory_is_lost():
    found = measure(5_000, points=5)
    assert found["programs"] == 8
    assert found["compiles"] == 0
    assert found["growth"] <= 0.02
