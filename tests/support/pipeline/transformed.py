"""Tables with transforms, and the rows that their targets must hold."""

from __future__ import annotations

import hashlib
import hmac

from tests.support.fix_pipeline import Mirror

ORDERS = """
    CREATE TABLE orders (id int PRIMARY KEY, price text, qty int, note text, long text);
    ALTER TABLE orders ALTER long SET STORAGE EXTERNAL;
    INSERT INTO orders SELECT i, i || '.50', i, 'note ' || i, repeat(chr(96 + i), 5000)
      FROM generate_series(1, 6) i;
    INSERT INTO orders VALUES (10, 'free', 10, NULL, NULL)
"""


KEY = "a long random text"


PEOPLE = """
    CREATE TABLE people (id int PRIMARY KEY, email text, region text, card text, pay numeric, tags text[],
      secret text);
    INSERT INTO people VALUES
        (1, 'a@x', 'EU', '4111111111111111', 5, '{q,r}', 's1'), (2, 'b@x', 'US', '42', 'NaN', NULL, 's2'),
        (3, NULL, 'EU', NULL, 1.50, '{}', 's3')
"""


RULE = {
    "table": "public.people",
    "columns": {
        "drop": ["secret"],
        "rename": {"card": "card_end"},
        "hash": ["id", "email", "pay", "tags"],
        "mask": {"card": {"last": 4}},
    },
    "where": "region = 'EU'",
}


LEAVE_AND_ENTER = """
    UPDATE people SET region = 'US' WHERE id = 1;
    UPDATE people SET region = 'EU' WHERE id = 2;
    INSERT INTO people VALUES (4, 'd@x', 'EU', '12345678', 7, NULL, 's4'), (5, 'e@x', 'US', NULL, NULL, NULL,
      's5');
    UPDATE people SET id = 6 WHERE id = 3
"""


def hashed(text: str) -> str:
    return hmac.new(KEY.encode(), text.encode(), hashlib.sha256).hexdigest()


def people(made: Mirror) -> list[tuple[object, ...]]:
    rows = made.rows("public.people", "id, email, region, card_end, pay")
    return sorted((tuple(row) for row in rows), key=str)


def expected(*rows: tuple[str, str | None, str | None, str | None]) -> list[tuple[object, ...]]:
    made = [
        (hashed(key), email and hashed(email), "EU", card, pay and hashed(pay))
        for key, email, card, pay in rows
    ]
    return sorted(made, key=str)
