"""Reference pages of the options of the Spark source and of the Postgres connector."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.connectors.settings import CONNECTOR_OPTIONS
from penstock.options import Option, OptionTable
from penstock.spark.options import SOURCE_OPTIONS

_SOURCE_INTRO = """\
# Options of the Spark source

<!-- Generated from src/penstock/spark/options.py by `make docs`. -->

For `spark.readStream.format("postgres-cdc")` and `spark.read.format("postgres-cdc")`. Names are case-insensitive.
Unknown options are errors. [The guide](../guides/spark-source.md) has examples.
"""
_CONNECTOR_INTRO = """\
# Options of the Postgres connector

<!-- Generated from src/penstock/connectors/settings.py by `make docs`. -->

Options of `PostgresConnector.open` and `discover_schema`. All values are text. Names are case-insensitive, and unknown
options are errors. [The guide](../guides/connectors.md) has examples.
"""


def source_options_page() -> str:
    return "\n".join([_SOURCE_INTRO, *_table(SOURCE_OPTIONS), ""])


def connector_options_page() -> str:
    return "\n".join([_CONNECTOR_INTRO, *_table(CONNECTOR_OPTIONS), ""])


def _table(options: OptionTable) -> Iterator[str]:
    yield "| option | type | default | description |"
    yield "|---|---|---|---|"
    for option in options.options:
        if not option.is_internal:
            yield f"| `{option.name}` | {option.kind.name} | {_default(option)} | {option.description} |"


def _default(option: Option) -> str:
    if option.is_required:
        return "required"
    return f"`{option.default_text}`" if option.default_text else ""
