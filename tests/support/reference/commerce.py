"""A shop in which several sessions change orders and customers, and the result of a SQL join after each
commit.

The statements of transactions interleave; commits happen one after the other, and the server evaluates the
join of both tables after each. So the expected join is known at every commit position.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any

import psycopg

from penstock.testing.streams import Background
from tests.support.fix_postgres import Database

CUSTOMERS = 12
ORDERS = 30

Customer = tuple[str | None, str | None]
"""Name and description."""
Order = tuple[int | None, int, Customer | None]
"""The number of the customer, the transaction that wrote the order last, and the customer, if it exists."""

_JOIN = """
SELECT o.id, o.customer, o.tx, c.id IS NOT NULL, c.name,
  c.about FROM orders o LEFT JOIN customers c ON c.id = o.customer
"""
_MARKS = 1_000_000
"""Every transaction leaves an order with this key and its own number, so that the stream shows the order of
commits.
"""

_TABLES = """
CREATE TABLE customers (id bigint PRIMARY KEY, name text, about text);
ALTER TABLE customers ALTER about SET STORAGE EXTERNAL;
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, tx bigint NOT NULL);
INSERT INTO customers SELECT g, 'first ' || g, repeat('a' || g, 2000) FROM generate_series(1, 12) g;
INSERT INTO orders SELECT g, 1 + g % 14, 0 FROM generate_series(1, 30) g;
"""


@dataclass
class Commerce:
    database: Database
    seed: int = 1
    joined_at: dict[int, dict[int, Order]] = field(default_factory=dict)
    """By transaction: every order with its customer, as the server joined them right after the commit."""
    customers_at: dict[int, dict[int, Customer]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """The transactions as they committed."""

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self._commits = threading.Lock()
        for statement in filter(str.strip, _TABLES.split(";\n")):
            self.database.execute(statement)
        with self.database.connect() as connection:
            self._look(connection, 0)

    def trade(self, people: int, transactions: int) -> None:
        """Run this number of sessions concurrently, each with this number of transactions."""
        at_work = [Background(partial(self._work, number, transactions)) for number in range(people)]
        for each in at_work:
            each.result(120, "the end of the working day")

    def clear_out(self) -> None:
        """All customers are deleted and some inserted again, in one transaction, without concurrent ones."""
        number = next(self._numbers)
        with self.database.connect() as connection:
            self._mark(connection, number, 3)
            connection.execute(
                "INSERT INTO customers VALUES (90, 'for a moment', 'only') ON CONFLICT DO NOTHING"
            )
            connection.execute("TRUNCATE customers")
            connection.execute(
                "INSERT INTO customers SELECT g, %s, 'new' FROM generate_series(2, 9) g", [f"by {number}"]
            )
            connection.execute("UPDATE orders SET tx = %s WHERE id <= 10", [number])
            self._commit(connection, number)

    def _work(self, person: int, transactions: int) -> None:
        dice = random.Random(f"{self.seed}/{person}/{len(self.order)}")
        with self.database.connect() as connection:
            for _ in range(transactions):
                number = next(self._numbers)
                try:
                    self._transact(connection, number, dice)
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    connection.rollback()

    def _transact(self, connection: psycopg.Connection, number: int, dice: random.Random) -> None:
        self._mark(connection, number, dice.randint(1, CUSTOMERS + 2))
        for _ in range(dice.randint(1, 4)):
            self._act(connection, number, dice)
        self._commit(connection, number)

    def _mark(self, connection: psycopg.Connection, number: int, customer: int) -> None:
        connection.execute("INSERT INTO orders VALUES (%s, %s, %s)", [_MARKS + number, customer, number])

    def _commit(self, connection: psycopg.Connection, number: int) -> None:
        with self._commits:
            connection.commit()
            self._look(connection, number)

    def _act(self, connection: psycopg.Connection, number: int, dice: random.Random) -> None:
        customer, other, order = (
            dice.randint(1, CUSTOMERS),
            dice.randint(1, CUSTOMERS + 2),
            dice.randint(1, ORDERS),
        )
        name = f"by {number}"
        acts: list[tuple[str, list[object]]] = [
            (
                "UPDATE customers SET name = %s WHERE id = %s",
                [name, customer],
            ),  # leaves the long text unchanged
            ("UPDATE customers SET name = NULL, about = repeat(%s, 900) WHERE id = %s", [name, customer]),
            ("DELETE FROM customers WHERE id = %s", [customer]),
            (
                (
                    "INSERT INTO customers VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE "
                    "SET name = excluded.name"
                ),
                [customer, name, name],
            ),
            # A key change, on both sides.
            (
                (
                    "UPDATE customers SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM customers "
                    "WHERE id = %s)"
                ),
                [other, customer, other],
            ),
            ("UPDATE orders SET id = id + 10000, tx = %s WHERE id = %s", [number, order]),
            ("UPDATE orders SET customer = %s, tx = %s WHERE id = %s", [other, number, order]),
            ("DELETE FROM orders WHERE id = %s", [order]),
            (
                "INSERT INTO orders VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE SET tx = excluded.tx",
                [order, other, number],
            ),
        ]
        statement, arguments = dice.choice(acts)
        connection.execute(statement.encode(), arguments)

    def _look(self, connection: psycopg.Connection, number: int) -> None:
        orders = connection.execute(_JOIN.encode()).fetchall()
        customers = connection.execute("SELECT id, name, about FROM customers").fetchall()
        connection.commit()
        self.joined_at[number] = {
            id_: (customer, tx, (name, about) if is_there else None)
            for id_, customer, tx, is_there, name, about in orders
        }
        self.customers_at[number] = {id_: (name, about) for id_, name, about in customers}
        self.order.append(number)


def check_against_sql(commerce: Commerce, rows: Iterable[Mapping[str, Any]], since: int | None = None) -> int:
    """Check that every change has the join result at its commit and that none is missing; returns the number
    of changes.

    `rows` are changes of orders with `found`, `customer_name` and `customer_about`, from a snapshot on, or
    from after transaction `since`.
    """
    changes = sorted(rows, key=lambda row: (row["_commit_version"], row["_ordinal"]))
    streamed = {
        row["id"] - _MARKS for row in changes if row["_change_type"] == "insert" and row["id"] >= _MARKS
    }
    if since is None:
        # The fence is after the last transaction that the stream lacks.
        since = next(tx for tx in reversed(commerce.order) if tx not in streamed)
        table: dict[int, tuple[int | None, int]] = {}
    else:
        table = {id_: order[:2] for id_, order in commerce.joined_at[since].items()}
    expected = commerce.order[commerce.order.index(since) + 1 :]
    transactions = [list(group) for _, group in groupby(changes, key=lambda row: row["_commit_version"])]
    if transactions and transactions[0][0]["_change_type"] == "snapshot":
        expected = [since, *expected]
    assert len(transactions) == len(expected), "each transaction is there, and in one piece"
    for tx, transaction in zip(expected, transactions, strict=True):
        last: dict[int, Customer | None] = {}
        for row in transaction:
            found = (row["customer_name"], row["customer_about"]) if row["found"] else None
            what = f"order {row['id']}, {row['_change_type']} at the commit of transaction {tx}"
            if row["_change_type"] == "delete":
                assert (found, row["customer_name"], row["customer_about"]) == (None, None, None), what
                table.pop(row["id"])
                last.pop(row["id"], None)
            else:
                assert found == commerce.customers_at[tx].get(row["customer"]), what
                table[row["id"]] = (row["customer"], row["tx"])
                last[row["id"]] = found
        joined = commerce.joined_at[tx]
        assert table == {id_: order[:2] for id_, order in joined.items()}, f"orders after transaction {tx}"
        assert last == {id_: joined[id_][2] for id_ in last}
    assert expected[-1] == commerce.order[-1], "up to the last transaction"
    return len(changes)
