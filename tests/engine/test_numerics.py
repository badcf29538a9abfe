import pytest

from outrider.constraints import grammar
from outrider.engine.numerics import KERNELS_REVISION, native_numerics, torch_numerics


@pytest.mark.parametrize(
    ("numerics", "text"),
    [
        (native_numerics("portable"), f"exact (portable {KERNELS_REVISION})"),
        (native_numerics("amx"), f"exact (amx {KERNELS_REVISION})"),
        (torch_numerics("float32", "cpu"), "exact up to ties (torch float32)"),
        (torch_numerics("bfloat16", "cpu"), "batch-dependent (torch bfloat16)"),
        (torch_numerics("bfloat16", "cuda"), "batch-dependent (cuda bfloat16)"),
        (torch_numerics("float32", "cpu", num_ranks=2), "exact up to ties (torch float32, 2 ranks)"),
    ],
)
def test_numerics_say_what_they_promise_by_which_kernels_and_what_constraints_allow(numerics, text):
    assert grammar.NUMERICS.startswith("llguidance ")
    assert str(numerics) == f"{text[:-1]}, {grammar.NUMERICS})"
