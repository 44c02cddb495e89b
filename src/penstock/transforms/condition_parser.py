"""Parse filter conditions that can be evaluated without Spark.

Supported are comparisons, `AND`, `OR`, `NOT`, `IN`, `BETWEEN`, `LIKE`, `IS NULL`, literals of plain types,
and casts that cannot fail. For every other condition the parser raises `NotSimple`. A parsed condition has
the same meaning as in Spark SQL.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Final

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.transforms.condition import (
    Cast,
    Compared,
    Condition,
    IsNull,
    Joined,
    Like,
    Literal,
    Named,
    Not,
    NotSimple,
    Operand,
    Truth,
)

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)(?![\w.])
      | (?P<string>'[^'\\]*'|"[^"\\]*")(?!['"])
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<sign><=>|<>|!=|==|<=|>=|[=<>(),-])
    )""",
    re.VERBOSE,
)
_SIGNS: Final = {
    "=": "=",
    "==": "=",
    "<>": "<>",
    "!=": "<>",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
    "<=>": "<=>",
}
_RESERVED: Final = frozenset(
    (
        "and",
        "or",
        "not",
        "in",
        "is",
        "null",
        "between",
        "like",
        "true",
        "false",
        "cast",
        "as",
        "case",
        "when",
        "interval",
        "escape",
    )
)
_CASTS: Final = {"string": pa.string(), "bigint": pa.int64(), "long": pa.int64()}
_MOST_DIGITS = 38
_INT32 = 1 << 31
_INT64 = 1 << 63


def parse_condition(text: str, columns: Mapping[str, pa.DataType]) -> Condition:
    """Parse the condition, and check it against the columns' types. Raises `NotSimple` if only Spark can
    evaluate the condition.
    """
    found = _Parser(_tokens(text), columns).parse()
    found.check(columns)
    return found


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise NotSimple(f"the text at character {at + 1}")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], columns: Mapping[str, pa.DataType]) -> None:
        self._tokens = tokens
        self._at = 0
        self._columns = columns

    def parse(self) -> Condition:
        found = self._or()
        if self._at < len(self._tokens):
            raise NotSimple(f"{self._tokens[self._at][1]!r}, where the condition might end")
        return found

    # words and signs
    # --------------------------------------------------------------------------------------------------------

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _word(self, *words: str) -> bool:
        """Consume these words if they are the next tokens. Returns whether they were."""
        ahead = self._tokens[self._at : self._at + len(words)]
        if [text.lower() for kind, text in ahead if kind == "word"] != list(words):
            return False
        self._at += len(words)
        return True

    def _sign(self, sign: str) -> bool:
        if self._peek() != ("sign", sign):
            return False
        self._at += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._sign(sign):
            raise NotSimple(f"{self._peek()[1]!r}, where {sign!r} might stand")

    # conditions
    # --------------------------------------------------------------------------------------------------------

    def _or(self) -> Condition:
        parts = [self._and()]
        while self._word("or"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else Joined(tuple(parts), is_and=False)

    def _and(self) -> Condition:
        parts = [self._not()]
        while self._word("and"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else Joined(tuple(parts), is_and=True)

    def _not(self) -> Condition:
        return Not(self._not()) if self._word("not") else self._predicate()

    def _predicate(self) -> Condition:
        if self._peek() == ("sign", "("):
            self._take()
            inner = self._or()
            self._expect(")")
            if self._peek()[1].lower() not in ("", "and", "or", ")"):
                raise NotSimple("a condition in brackets as part of a comparison")
            return inner
        left = self._operand()
        kind, text = self._peek()
        if kind == "sign" and text in _SIGNS:
            self._take()
            return self._compared(_SIGNS[text], left, self._operand())
        if self._word("is"):
            return self._is(left)
        negated = self._word("not")
        found = self._following(left)
        if found is None:
            if negated:
                raise NotSimple("NOT after a value")
            return Truth(left)
        return Not(found) if negated else found

    def _is(self, left: Operand) -> Condition:
        negated = self._word("not")
        if self._word("null"):
            found: Condition = IsNull(left)
        elif self._word("true"):
            found = Compared("<=>", left, Literal(pa.scalar(True)))
        elif self._word("false"):
            found = Compared("<=>", left, Literal(pa.scalar(False)))
        else:
            raise NotSimple(f"IS {self._peek()[1]}")
        return Not(found) if negated else found

    def _following(self, left: Operand) -> Condition | None:
        if self._word("between"):
            low = self._operand()
            if not self._word("and"):
                raise NotSimple("BETWEEN without AND")
            high = self._operand()
            return Joined((self._compared(">=", left, low), self._compared("<=", left, high)), is_and=True)
        if self._word("in"):
            self._expect("(")
            parts = [self._compared("=", left, self._operand())]
            while self._sign(","):
                parts.append(self._compared("=", left, self._operand()))
            self._expect(")")
            return Joined(tuple(parts), is_and=False)
        if self._word("like"):
            kind, text = self._take()
            if kind != "string":
                raise NotSimple("LIKE with a pattern that is not a text literal")
            return Like(left, text[1:-1])
        return None

    def _compared(self, sign: str, left: Operand, right: Operand) -> Condition:
        """Return the comparison of two expressions. As in Spark, a text literal beside a date or time becomes
        a date or time, and a decimal literal beside a float becomes a float.
        """
        return Compared(
            sign, _suited(left, right.type_in(self._columns)), _suited(right, left.type_in(self._columns))
        )

    # operands
    # --------------------------------------------------------------------------------------------------------

    def _operand(self) -> Operand:
        kind, text = self._take()
        if (kind, text) == ("sign", "-"):
            kind, text = self._take()
            if kind != "number":
                raise NotSimple("arithmetic")
            return Literal(_number(f"-{text}"))
        if kind == "number":
            return Literal(_number(text))
        if kind == "string":
            return Literal(pa.scalar(text[1:-1], pa.string()))
        if kind == "quoted":
            return Named(_resolve(text[1:-1].replace("``", "`"), self._columns))
        if kind == "word":
            return self._named(text)
        raise NotSimple(f"{text!r}, where a value might stand")

    def _named(self, text: str) -> Operand:
        word = text.lower()
        if word in ("true", "false"):
            return Literal(pa.scalar(word == "true"))
        if word in ("date", "timestamp") and self._peek()[0] == "string":
            literal = self._take()[1][1:-1]
            return Literal(_date(literal) if word == "date" else _time(literal, "UTC"))
        if word == "cast" and self._sign("("):
            operand = self._operand()
            if not self._word("as"):
                raise NotSimple("CAST without AS")
            kind = self._take()[1].lower()
            self._expect(")")
            if kind not in _CASTS:
                raise NotSimple(f"a cast to {kind}")
            return Cast(operand, _CASTS[kind])
        if self._peek() == ("sign", "("):
            raise NotSimple(f"the function {text}")
        if word in _RESERVED:
            raise NotSimple(f"{text!r}, where a value might stand")
        return Named(_resolve(text, self._columns))


def _resolve(text: str, columns: Collection[str]) -> str:
    """Return the name if it is a column; otherwise raise `ConfigError`. Names are case-sensitive, as
    everywhere in the configuration.
    """
    if text not in columns:
        raise ConfigError(
            f"there is no column {text!r}", hint=f"the columns are {', '.join(sorted(columns))}"
        )
    return text


def _number(text: str) -> pa.Scalar:
    if re.search("[eE]", text):
        return pa.scalar(float(text), pa.float64())
    if "." not in text:
        value = int(text)
        if -_INT64 <= value < _INT64:
            return pa.scalar(value, pa.int32() if -_INT32 <= value < _INT32 else pa.int64())
    number = Decimal(text)
    digits = number.as_tuple()
    scale = max(0, -int(digits.exponent))
    precision = max(len(digits.digits), scale)
    if precision > _MOST_DIGITS:
        raise NotSimple("a number of more than 38 digits")
    return pa.scalar(number, pa.decimal128(precision, scale))


def _suited(operand: Operand, beside: pa.DataType) -> Operand:
    if not isinstance(operand, Literal):
        return operand
    kind, value = operand.value.type, operand.value.as_py()
    if pa.types.is_string(kind) and pa.types.is_date(beside):
        return Literal(_date(value))
    if pa.types.is_string(kind) and pa.types.is_timestamp(beside):
        return Literal(_time(value, beside.tz))
    if pa.types.is_decimal(kind) and pa.types.is_floating(beside):
        return Literal(pa.scalar(float(value), pa.float64()))
    return operand


def _date(text: str) -> pa.Scalar:
    try:
        return pa.scalar(
            date.fromisoformat(text) if re.fullmatch(r"\d{4}-\d\d-\d\d", text) else _none(), pa.date32()
        )
    except ValueError:
        raise NotSimple("a date that is not written as 2024-12-31") from None


def _time(text: str, zone: str | None) -> pa.Scalar:
    """Parse a timestamp literal. If the type has a time zone (`zone`), the literal is in UTC."""
    try:
        known = re.fullmatch(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d:\d\d(\.\d{1,6})?)?", text)
        value = datetime.fromisoformat(text).replace(tzinfo=UTC if zone else None) if known else _none()
        return pa.scalar(value, pa.timestamp("us", zone))
    except ValueError:
        raise NotSimple("a time that is not written as 2024-12-31 23:59:59") from None


def _none() -> datetime:
    raise ValueError
