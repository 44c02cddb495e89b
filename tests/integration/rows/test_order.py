"""Many changes at one LSN: each has its own ordinal."""

from __future__ import annotations

from tests.support.fix_captured import Captured


def test_R16_rows_of_one_copy_or_statement_have_different_ordinals(captured: Captured) -> None:
    captured.execute("CREATE TABLE r16 (id int PRIMARY KEY, note text)")
    with captured.database.connect() as connection, connection.cursor() as cursor:
        with cursor.copy("COPY r16 FROM STDIN") as copy:
            for number in range(5000):
                copy.write_row((number, "copied"))
        cursor.execute("INSERT INTO r16 SELECT i, 'inserted' FROM generate_series(5000, 9999) i")
        cursor.execute("UPDATE r16 SET id = -id WHERE id BETWEEN 1 AND 100")
        connection.commit()
    captured.execute("INSERT INTO r16 SELECT i, 'next' FROM generate_series(10000, 10999) i")
    rows = captured.full_rows("r16")
    places = [(row["_commit_version"], row["_ordinal"]) for row in rows]
    assert len(set(places)) == len(rows) == 10_000 + 2 * 100 + 1000
    first, second = sorted({version for version, _ in places})
    assert [ordinal for version, ordinal in places if version == first] == list(range(10_200))
    assert [ordinal for version, ordinal in places if version == second] == list(range(1000))
    inserted = [row["id"] for row in rows if row["_change_type"] == "insert"]
    assert inserted[:10_000] == list(range(10_000))
    assert inserted[10_100:] == list(range(10_000, 11_000))


def test_R16_order_holds_across_the_tables_of_a_transaction(captured: Captured) -> None:
    captured.execute("CREATE TABLE r16_a (id int PRIMARY KEY)", "CREATE TABLE r16_b (id int PRIMARY KEY)")
    with captured.transaction():
        for number in range(0, 40, 2):
            captured.execute(
                f"INSERT INTO r16_a VALUES ({number})", f"INSERT INTO r16_b VALUES ({number + 1})"
            )
    rows = captured.full_rows("r16_a") + captured.full_rows("r16_b")
    ordered = sorted(rows, key=lambda row: (row["_commit_version"], row["_ordinal"]))
    assert [row["id"] for row in ordered] == list(range(40))
    assert [row["_ordinal"] for row in ordered] == list(range(40))
