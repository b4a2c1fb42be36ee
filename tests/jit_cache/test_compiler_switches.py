"""While the compile thread works, the interpreter changes threads sooner; afterwards as before."""

import sys

import pytest
from servax.jit_cache import CompileService
from servax.jit_cache.switches import quick_switches


def test_a_job_of_the_compile_service_has_threads_change_quickly():
    before_s = sys.getswitchinterval()
    service = CompileService()
    try:
        assert service.submit(sys.getswitchinterval).result(30.0) <= 0.0005
    finally:
        service.close()
    assert sys.getswitchinterval() == before_s


def test_the_last_one_that_leaves_puts_back_what_was_set_even_after_an_error():
    before_s = sys.getswitchinterval()
    with quick_switches():
        with pytest.raises(KeyError), quick_switches():
            raise KeyError("job")
        assert sys.getswitchinterval() < before_s
    assert sys.getswitchinterval() == before_s


@pytest.mark.parametrize("before_s", [0.005, 0.0017, 0.0123456])
def test_it_does_not_drift(before_s):
    old_s = sys.getswitchinterval()
    sys.setswitchinterval(before_s)
    try:
        held_s = sys.getswitchinterval()
        for _ in range(100):
            with quick_switches():
                pass
        assert sys.getswitchinterval() == held_s
    finally:
        sys.setswitchinterval(old_s)


def test_an_interval_that_is_shorter_already_stays():
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        with quick_switches():
            assert sys.getswitchinterval() < 0.0002
    finally:
        sys.setswitchinterval(before_s)
