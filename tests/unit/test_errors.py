from __future__ import annotations

import pickle
import re
from types import SimpleNamespace

import pytest

from penstock.errors import PenstockError, Recovery, SlotBusyError, SlotLostError
from penstock.foreign import describe


def tree(root: type[PenstockError]) -> list[type[PenstockError]]:
    return [root, *(each for child in root.__subclasses__() for each in tree(child))]


EVERY_ERROR = tree(PenstockError)
every_error = pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda kind: kind.__name__)


@every_error
def test_code_has_the_form_that_users_search_for(kind: type[PenstockError]) -> None:
    assert re.fullmatch(r"PEN-\d{4}", kind.code)


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in EVERY_ERROR]
    assert sorted(codes) == sorted(set(codes))


@every_error
def test_every_error_declares_its_own_code(kind: type[PenstockError]) -> None:
    assert "code" in vars(kind)
    assert isinstance(kind.recovery, Recovery)


@every_error
def test_every_error_has_its_own_documentation(kind: type[PenstockError]) -> None:
    assert kind.__doc__
    assert kind.__doc__.endswith(".") or "\n" in kind.__doc__


@every_error
@pytest.mark.parametrize("hint", [None, "ALTER SYSTEM SET wal_level = 'logical'"])
def test_an_error_survives_the_way_between_processes(kind: type[PenstockError], hint: str | None) -> None:
    error = kind("what happened", hint=hint)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint, str(copy)) == (error.message, error.hint, str(error))


def test_of_an_exception_that_is_not_ours_only_the_kind_is_shown() -> None:
    """Other libraries may quote a row: `The value 'hunter2' of the type "STRING" cannot be cast`."""
    text = "[CAST_INVALID_INPUT] The value 'hunter2' of the type \"STRING\" cannot be cast"
    gone = type("Py4JJavaError", (Exception,), {"java_exception": property(lambda self: SimpleNamespace())})
    found = [describe(kind("hunter2")) for kind in (ValueError, KeyError, OSError, gone)]
    assert found == ["ValueError", "KeyError", "OSError", "Py4JJavaError"]
    assert describe(ValueError(text)) == "CAST_INVALID_INPUT"
    assert describe(PermissionError(13, "Permission denied", "/lake/x")) == "Permission denied"
    assert (
        describe(FileNotFoundError(2, "No such file or directory", "/lake/x"))
        == "the file /lake/x is missing"
    )


def test_code_and_fix_are_part_of_the_text_because_spark_hands_over_only_text() -> None:
    text = str(SlotLostError("the slot was invalidated", hint="penstock resync"))
    assert text == "PEN-1204: the slot was invalidated\n  fix: penstock resync"
    assert str(SlotBusyError("taken")) == "PEN-1202: taken"
