"""What Postgres is asked for to make random values: an expression for each type."""

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
