"""Token files: their format, and the names, priorities and rates of clients."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from outrider.errors import CapacityError, ConfigError, NotAllowedError, UnauthenticatedError
from router.api.clients import CHECK_SECONDS, Caller, Clients, TokenFile, split_key


def line(name, token, *limits):
    return " ".join((name, f"sha256:{hashlib.sha256(token.encode()).hexdigest()}", *limits))


def shown(token):
    return (("user-agent", "test"), ("authorization", f"Bearer {token}"))


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "tokens"

    def write_lines(*lines):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_lines


def test_a_token_says_who_calls_and_what_it_may(write):
    clients = TokenFile(
        write("# clients", "", line("alice", "a-secret", "priority=5", "rate=60"), line("bob", "b-secret") + " # old")
    )
    alice, bob = clients.identify(shown("a-secret")), clients.identify(shown("b-secret"))
    assert (alice.name, alice.share, alice.max_priority) == ("alice", "alice", 5)
    assert (bob.name, bob.max_priority) == ("bob", 0)
    alice.check_priority(5)
    for caller, priority in ((alice, 6), (bob, 1)):
        with pytest.raises(NotAllowedError, match="priority"):
            caller.check_priority(priority)


def test_only_clients_with_the_option_may_change_adapters(write):
    clients = TokenFile(write(line("alice", "a-secret", "adapters", "rate=60"), line("bob", "b-secret", "priority=5")))
    clients.identify(shown("a-secret")).check_adapters()
    with pytest.raises(NotAllowedError, match="bob may not load or unload adapters") as caught:
        clients.identify(shown("b-secret")).check_adapters()
    assert caught.value.reason == "ADAPTERS_NOT_ALLOWED"
    Clients().identify(None).check_adapters()  # without a token file, everybody may


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (("client_id", "alice"),),
        (("authorization", "a-secret"),),
        (("authorization", "Basic a-secret"),),
        shown("A-secret"),
        shown(""),
        shown(hashlib.sha256(b"a-secret").hexdigest()),
    ],
)
def test_without_a_known_token_nobody_is_served(write, metadata):
    with pytest.raises(UnauthenticatedError):
        TokenFile(write(line("alice", "a-secret"))).identify(metadata)


def test_tenants_have_salts_of_their_own_and_a_single_one_has_none(write):
    path = write(line("alice", "a-secret"), line("alice", "a-new-secret"))
    clients = TokenFile(path, clock=itertools.count(step=CHECK_SECONDS).__next__)
    assert clients.identify(shown("a-secret")) == clients.identify(shown("a-new-secret"))
    assert clients.identify(shown("a-secret")).cache_salt == b""
    write(line("alice", "a-secret"), line("bob", "b-secret"))
    assert clients.identify(shown("a-secret")).cache_salt == b"alice"
    assert clients.identify(shown("b-secret")).cache_salt == b"bob"
    assert clients.named("bob").cache_salt == b"bob"  # for a request that another router started


def test_a_changed_file_is_taken_and_a_broken_one_is_not(write):
    path = write(line("alice", "a-secret"))
    clients = TokenFile(path, clock=itertools.count(step=CHECK_SECONDS).__next__)
    write(line("bob", "b-secret"))
    with pytest.raises(UnauthenticatedError):
        clients.identify(shown("a-secret"))
    write("bob sha256:123")
    assert clients.identify(shown("b-secret")).name == "bob"
    path.unlink()
    assert clients.identify(shown("b-secret")).name == "bob"


def test_a_client_makes_as_many_calls_a_minute_as_it_may(write):
    now = 100.0
    clients = TokenFile(
        write(line("alice", "a", "rate=3"), line("alice", "b", "rate=3"), line("bob", "c")), clock=lambda: now
    )
    alice, bob = clients.identify(shown("a")), clients.identify(shown("c"))
    for token in "aba":
        clients.charge(clients.identify(shown(token)))
    with pytest.raises(CapacityError, match="rate limit of 3 calls per minute exceeded for alice") as refused:
        clients.charge(alice)
    assert refused.value.retry_after_seconds == pytest.approx(20.0)
    for _ in range(10):
        clients.charge(bob)
    now += 20.0
    clients.charge(alice)
    with pytest.raises(CapacityError):
        clients.charge(alice)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "has no token"),
        (("alice",), "tokens:1: expected NAME sha256:HEX"),
        (("", "al/ice sha256:" + "0" * 64), "tokens:2: expected NAME sha256:HEX"),
        (("alice sha256:" + "0" * 63,), "expected NAME sha256:HEX"),
        ((line("alice", "a", "speed=9"),), "'speed=9' is neither priority=N, rate=N nor adapters"),
        ((line("alice", "a", "adapters", "adapters"),), "'adapters' is neither .* or there twice"),
        ((line("alice", "a", "adapters=1"),), "'adapters=1' is neither"),
        ((line("alice", "a", "adapters"), line("alice", "b")), "tokens:2: alice has different limits"),
        ((line("alice", "a", "rate=0"),), "'rate=0' is neither"),
        ((line("alice", "a", "priority=high"),), "'priority=high' is neither"),
        ((line("alice", "a", "rate=1"), line("alice", "b", "rate=2")), "tokens:2: alice has different limits"),
        ((line("alice", "a"), line("bob", "a")), "tokens:2: the token already belongs to alice"),
    ],
)
def test_what_a_file_may_not_contain_is_named(write, lines, message):
    with pytest.raises(ConfigError, match=message):
        TokenFile(write(*lines))


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(tmp_path / "tokens")


def test_requests_of_two_clients_have_two_keys():
    assert Caller().key_of("r") == "r"
    assert split_key("r") == ("", "r")
    keys = {Caller(name=name).key_of("r") for name in ("", "alice", "bob")}
    assert len(keys) == 3
    assert split_key(Caller(name="alice").key_of("r")) == ("alice", "r")


def test_where_nobody_is_asked_clients_name_their_share():
    assert Clients().identify((("client_id", "x" * 200),)) == Caller(share="x" * 128)
    assert Clients().identify(None) == Caller()
