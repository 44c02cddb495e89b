"""When `confirm: applied` falls back to `spooled`, and what may be confirmed."""

from __future__ import annotations

import pytest

from penstock.capture.settings import Confirm, ConfirmPolicy
from penstock.position import Lsn, Position

LIMIT = 1000


def look(
    policy: ConfirmPolicy,
    *,
    server: int,
    restart: int | None,
    released: int | None,
    sealed: int | None = None,
) -> Confirm:
    """By default the spool holds everything the server has."""
    policy.update(
        Position.of(server),
        None if restart is None else Lsn(restart),
        None if released is None else Position.of(released),
        Position.of(server if sealed is None else sealed),
    )
    return policy.mode


def test_it_switches_above_the_limit_and_back_only_well_below_it() -> None:
    policy = ConfirmPolicy(Confirm.APPLIED, LIMIT)
    assert look(policy, server=2000, restart=1000, released=1000) is Confirm.APPLIED
    assert look(policy, server=2001, restart=1000, released=1000) is Confirm.SPOOLED
    assert policy.gives_way
    assert look(policy, server=2001, restart=1900, released=1100) is Confirm.SPOOLED, (
        "no flutter around the limit"
    )
    assert look(policy, server=2001, restart=1900, released=1201) is Confirm.APPLIED
    assert not policy.gives_way


def test_the_slots_own_progress_does_not_switch_it_back_while_consumers_are_behind() -> None:
    policy = ConfirmPolicy(Confirm.APPLIED, LIMIT)
    look(policy, server=5000, restart=100, released=100)
    assert look(policy, server=5000, restart=5000, released=100) is Confirm.SPOOLED


def test_a_long_transaction_alone_does_not_switch_it_while_consumers_are_level() -> None:
    policy = ConfirmPolicy(Confirm.APPLIED, LIMIT)
    assert look(policy, server=50_000, restart=100, released=50_000) is Confirm.APPLIED
    assert look(policy, server=50_000, restart=100, released=49_800) is Confirm.APPLIED, (
        "a fifth of the limit is nothing"
    )
    assert look(policy, server=50_000, restart=100, released=49_799) is Confirm.SPOOLED
    assert look(policy, server=50_000, restart=100, released=49_830) is Confirm.SPOOLED, (
        "no flutter around the margin"
    )
    assert look(policy, server=50_000, restart=100, released=49_840) is Confirm.APPLIED


def test_it_does_not_switch_while_nothing_more_is_sealed_than_released() -> None:
    policy = ConfirmPolicy(Confirm.APPLIED, LIMIT)
    assert look(policy, server=50_000, restart=100, released=100, sealed=100) is Confirm.APPLIED
    assert look(policy, server=50_000, restart=100, released=100, sealed=5000) is Confirm.SPOOLED


@pytest.mark.parametrize(
    ("configured", "limit"), [(Confirm.APPLIED, None), (Confirm.SPOOLED, LIMIT), (Confirm.SPOOLED, None)]
)
def test_without_a_limit_or_when_disabled_it_never_switches(configured: Confirm, limit: int | None) -> None:
    policy = ConfirmPolicy(configured, limit)
    assert look(policy, server=1 << 40, restart=1, released=1) is configured
    assert look(policy, server=1, restart=1, released=1) is configured


def test_a_slot_that_is_gone_and_no_consumer_say_nothing() -> None:
    policy = ConfirmPolicy(Confirm.APPLIED, LIMIT)
    assert look(policy, server=1 << 40, restart=None, released=None) is Confirm.APPLIED


@pytest.mark.parametrize(
    ("mode", "released", "sealed", "confirmable"),
    [
        (Confirm.APPLIED, 5, 9, 5),
        (Confirm.APPLIED, None, 9, None),
        (Confirm.APPLIED, 0, 9, None),
        (Confirm.SPOOLED, 5, 9, 9),
        (Confirm.SPOOLED, None, 9, 9),
        (Confirm.SPOOLED, 5, None, None),
    ],
)
def test_confirmable_positions(
    mode: Confirm, released: int | None, sealed: int | None, confirmable: int | None
) -> None:
    found = ConfirmPolicy(mode, None).confirmable(
        None if released is None else Position.of(released), None if sealed is None else Position.of(sealed)
    )
    assert found == (None if confirmable is None else Position.of(confirmable))
