"""The lookup of a target's addresses."""

from __future__ import annotations

import pytest

from outrider.service.resolver import resolve_with_dns


@pytest.mark.parametrize("target", ["127.0.0.1:5", "[::1]:5", "unix:/tmp/x", "ipv4:127.0.0.1:5", "nonsense"])
async def test_addresses_and_other_schemes_stay_as_they_are(target):
    assert await resolve_with_dns(target) == [target]


async def test_a_name_of_both_families_is_one_node():
    assert await resolve_with_dns("localhost:5") == ["127.0.0.1:5"]


async def test_an_unknown_name_is_an_error_of_the_system():
    for target in ("does-not-exist.invalid:5", "x" * 80 + ".test:5", "localhost:99999999999999999999"):
        with pytest.raises(OSError, match=r"."):
            await resolve_with_dns(target)
