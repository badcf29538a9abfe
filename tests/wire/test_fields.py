from __future__ import annotations

from dataclasses import dataclass

import pytest

from outrider.answer import Usage
from outrider.v1 import router_pb2
from outrider.wire.fields import Fields


@dataclass(frozen=True)
class MoreThanUsage(Usage):
    extra: int = 0


@dataclass(frozen=True)
class LessThanUsage:
    num_prompt_tokens: int = 0


@pytest.mark.parametrize(
    ("value_type", "forgotten"), [(MoreThanUsage, "extra"), (LessThanUsage, "num_cached_tokens, num_generated_tokens")]
)
def test_a_field_without_a_counterpart_is_an_error(value_type, forgotten):
    with pytest.raises(TypeError, match=forgotten):
        Fields(value_type, router_pb2.Usage)


def test_fields_of_one_name_are_copied():
    fields = Fields(Usage, router_pb2.Usage)
    assert fields.from_proto(router_pb2.Usage(num_cached_tokens=3)) == Usage(num_cached_tokens=3)
    assert fields.to_proto(Usage(num_prompt_tokens=2)) == router_pb2.Usage(num_prompt_tokens=2)
