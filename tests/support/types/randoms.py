"""Random values from Postgres: a SQL expression for each type."""

from __future__ import annotations

NUMBERS = {
    "int2": "(random() * 65535 - 32768)::int2",
    "int4": "((random() - 0.5) * 4294967294)::int4",
    "int8": "((random() - 0.5) * 18446744073709549568)::int8",
    "oid": "(random() * 4294967295)::int8::oid",
    "float4": "((random() - 0.5) * power(10, random() * 60 - 30))::float4",
    "float8": "(random() - 0.5) * power(10, random() * 500 - 250)",
    "numeric(12,2)": "((random() - 0.5) * 1e10)::numeric(12,2)",
}

TEXT = "substr(E'ab{}\",\\\\ \\n''é漢🙂NULL', (random() * 12)::int, (random() * 5)::int)"
MOMENT = "timestamp '0001-01-01' + random() * interval '9998 years'"
_RECENT = "now() - random() * interval '1 year'"
_PATH = "polygon(box(point(random(), random()), point(-random(), 2)))::path"
_INTERVAL = (
    "make_interval((random() * 9 - 5)::int, (random() * 99)::int, 0, (random() * 9 - 5)::int, 0, "
    "0, random() * 1e6 - 5e5)"
)


def rendered(version: int) -> dict[str, str]:
    """Built-in types that stay as Postgres writes them, and that it can compare and order; those of a server
    of this version.
    """
    infinite = "(ARRAY['infinity', '-infinity'])[1 + (random())::int]::interval"
    return {
        "name": TEXT,
        "bit(5)": "(random() * 31)::int::bit(5)",
        "varbit": "(random() * 31)::int::bit(5)::varbit",
        "time": f"({MOMENT})::time",
        "timetz": f"(({MOMENT})::time::text || '+05:30')::timetz",
        "interval": f"CASE WHEN random() < 0.1 THEN {infinite} ELSE {_INTERVAL} END"
        if version >= 17
        else _INTERVAL,
        "jsonb": f"jsonb_build_object({TEXT}, random(), 'b', ARRAY[NULL, {TEXT}])",
        "inet": "('10.0.0.0'::inet + (random() * 16777215)::int)",
        "cidr": "network(set_masklen('10.0.0.0'::inet + (random() * 16777215)::int, 8 + (random() * "
        "24)::int))",
        "macaddr": "substr(md5(random()::text), 1, 12)::macaddr",
        "macaddr8": "substr(md5(random()::text), 1, 16)::macaddr8",
        **{
            f"int{size}range": f"int{size}range((random() * 9)::int, 9 + (random() * 9)::int, '[]')"
            for size in (4, 8)
        },
        "numrange": "numrange(NULL, ((random() - 0.5) * 1e6)::numeric, (ARRAY['()', '(]'])[1 + "
        "random()::int])",
        "daterange": "daterange(current_date - (random() * 999)::int, CASE WHEN random() < 0.5 THEN "
        "'infinity'::date END)",
        "tsrange": f"tsrange(({_RECENT})::timestamp, now()::timestamp)",
        "tstzrange": f"tstzrange({_RECENT}, NULL)",
        **{
            f"int{size}multirange": f"int{size}multirange(int{size}range(NULL, (random() * 9)::int), "
            f"int{size}range(20, 30))"
            for size in (4, 8)
        },
        "nummultirange": "nummultirange(numrange(0, random()::numeric), numrange(2, NULL))",
        "datemultirange": "datemultirange(daterange(current_date - (random() * 999)::int, current_date, "
        "'[]'))",
        "tsmultirange": f"CASE WHEN random() < 0.1 THEN '{{}}' ELSE "
        f"tsmultirange(tsrange(({_RECENT})::timestamp, NULL)) END",
        "tstzmultirange": f"tstzmultirange(tstzrange({_RECENT}, now()))",
        "tsvector": "array_to_tsvector(ARRAY[md5(random()::text), 'a b'])",
        "tsquery": "(quote_literal(substr(md5(random()::text), 1, 5)) || ' & !b <-> ''c d'':*A')::tsquery",
        "pg_lsn": "('0/0'::pg_lsn + (random() * 1e15)::numeric::int8)",
        "xid8": "(random() * 1e18)::int8::text::xid8",
    }


UNORDERED = {
    "json": f"to_json({TEXT})",
    "xml": f"xmlelement(name a, xmlattributes({TEXT} AS b), {TEXT})",
    "point": "point(random(), -random())",
    "box": "box(point(random(), random()), point(-random(), random()))",
    "lseg": "lseg(point(random(), -random()), point(-random(), random()))",
    "path": f"CASE WHEN random() < 0.5 THEN popen({_PATH}) ELSE pclose({_PATH}) END",
    "polygon": "polygon(box(point(random(), random()), point(-random(), random())))",
    "circle": "circle(point(-random(), random()), random())",
    "line": "line(point(random(), random()), point(-1 - random(), 3))",
}
"""Built-in types that stay as Postgres writes them, and that cannot be keys."""
