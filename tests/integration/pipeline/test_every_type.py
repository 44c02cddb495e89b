"""Every family of types, from Postgres through snapshot and stream into Delta."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

from penstock.errors import UnrepresentableError
from tests.support.fix_pipeline import MirrorFactory
from tests.support.fix_postgres import Database
from tests.support.types.every_type import POINT, create_every, insert_every


def test_every_type_reaches_the_target_by_both_roads(database: Database, mirror: MirrorFactory) -> None:
    create_every(database)
    insert_every(database, 1)
    database.execute("CREATE TABLE by_list (k int[] PRIMARY KEY, v int)")
    database.execute("INSERT INTO by_list VALUES ('{1,2}', 1), ('{{1},{2}}', 1), ('{}', 1), ('[0:0]={1}', 1)")
    types = mirror()
    types.run_once()
    insert_every(database, 5)
    database.execute(
        'UPDATE every SET i = 7, h = \'"c"=>"d"\' WHERE id IN (1, 5); DELETE FROM every WHERE id IN (2, 6)'
    )
    database.execute(
        "UPDATE by_list SET v = 2; DELETE FROM by_list WHERE k IN ('{1,2}', '{{1},{2}}'); "
        "INSERT INTO by_list VALUES ('{NULL}', 3)"
    )
    types.run_once()
    types.assert_equal("public.every", "public.by_list")

    rows = {row["id"]: row.asDict(recursive=True) for row in types.rows("public.every")}
    by_snapshot, by_stream = rows[3], rows[7]
    assert repr({**by_snapshot, "id": 0}) == repr({**by_stream, "id": 0})
    assert by_stream["_exact"] == {"u": "NaN", "md": "{{1,2},{3,4}}"}
    assert by_stream["h"] == {"a": "1", "b": None}
    assert by_stream["s"] == {"srid": 4326, "wkb": bytearray.fromhex("0101000000" + POINT)}
    assert (by_stream["d"], by_stream["da"]) == (date(1500, 2, 28), [date(1500, 2, 28)])
    assert by_stream["ts"] == datetime(1, 1, 1, 0, 0, 0, 1)  # noqa: DTZ001
    assert (by_stream["p"], by_stream["na"]) == (Decimal("1.01"), [Decimal("1.3")])
    assert rows[1]["big"] == rows[5]["big"] == {"big": "x" * 5000}
    assert {str(row["k"] or row["_exact"]): row["v"] for row in types.rows("public.by_list")} == {
        "None": 2,
        "{'k': '[0:0]={1}'}": 2,
        "[None]": 3,
    }


def test_C08_a_value_beyond_its_type_stops_only_its_table_with_policy_error(
    database: Database, mirror: MirrorFactory
) -> None:
    for name in ("copied", "streamed"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, d date, n numeric); "
            f"INSERT INTO {name} VALUES (1, '2024-01-01', 'NaN')"
        )
    database.execute("INSERT INTO copied VALUES (2, 'infinity', 1)")
    strict = mirror(types={"on_unrepresentable": "error", "numeric": "string"})
    assert set(strict.run_once().failed) == {"public.copied"}
    database.execute("INSERT INTO streamed VALUES (2, '0044-03-15 BC', 2)")
    failed = strict.run_once().failed
    assert {name: (status.reason or "").partition(",")[0] for name, status in failed.items()} == {
        f"public.{name}": f"{UnrepresentableError.code}: column 'd' of public.{name} holds a value that "
        "its type cannot hold"
        for name in ("copied", "streamed")
    }
    assert [(row["id"], row["n"]) for row in strict.rows("public.streamed")] == [(1, "NaN")]
