"""Writes the reference pages that come from the code: `python -m penstock.cli.docs docs/reference`, or `make docs`.

Pages are committed, so that they can be read where the code is; a test holds that they are current.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.cli.contracts_page import contracts_page
from penstock.cli.types_page import types_page
from penstock.connectors.settings import connector_options_page
from penstock.errors import PenstockError, Recovery
from penstock.pipeline.config import PipelineConfig, SourceConfig, SparkConfig, TlsConfig, TypesConfig
from penstock.pipeline.maintenance_config import MaintenanceConfig
from penstock.pipeline.polling_config import PollingConfig
from penstock.pipeline.sink_config import DeltaConfig, IcebergConfig, ParquetConfig, PostgresConfig, SinkConfig
from penstock.pipeline.table_rules import TableRule
from penstock.pipeline.transform_config import ColumnsConfig, MaskConfig
from penstock.spark.options import options_page

_MODULES = re.compile(r"\b(?:[a-z_]+\.)+")
"""Where a type is declared, before its name."""

_FOLLOWS: Mapping[Recovery, str] = {
    Recovery.RETRY: "Penstock backs off and tries again by itself, from the same position.",
    Recovery.OPERATOR: "Penstock stops, or stops the one table, and says what you can do.",
    Recovery.FATAL: "Penstock stops, because going on could harm data. Please report it.",
}


def errors_page() -> str:
    """The reference of error codes, in the order of the codes."""
    lines = [
        "# Error codes",
        "",
        "<!-- Generated from src/penstock/errors.py by `make docs`. -->",
        "",
        "Every error that Penstock raises on purpose starts with one of these codes, in logs, in status and in what Spark reports.",
        "Where there is a fix, the message ends with it.",
        "",
        "What follows an error depends on its kind:",
        "",
        "| kind | what follows |",
        "|---|---|",
        *(f"| {recovery.value} | {text} |" for recovery, text in _FOLLOWS.items()),
        "",
        "| code | error | kind | meaning |",
        "|---|---|---|---|",
        *(f"| `{kind.code}` | {kind.__name__} | {kind.recovery.value} | {_meaning(kind)} |" for kind in _sorted_errors()),
    ]
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Every key of the configuration file, from its declaration."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated from src/penstock/pipeline/config.py by `make docs`. -->",
        "",
        "One YAML file. A path is relative to the file, or a `file:` URL; other URLs, such as `s3:`, are refused. A key that is not listed",
        "here is an error. Durations are written as `500 ms`, `1 second`, `10 minutes`, `2 hours` or `7 days`.",
    ]
    for model, key in _MODELS.items():
        summary = inspect.cleandoc(model.__doc__ or "")
        lines += ["", f"## {key}", "", " ".join(summary.split()), "", "| key | type | default | |", "|---|---|---|---|"]
        lines += [_field_row(name, field) for name, field in model.model_fields.items()]
    return "\n".join(lines) + "\n"


_MODELS: Mapping[type[BaseModel], str] = {
    PipelineConfig: "The file",
    SourceConfig: "`source`",
    PollingConfig: "`source.polling`",
    TlsConfig: "`source.tls`",
    TableRule: "`tables[]`",
    ColumnsConfig: "`tables[].columns`",
    MaskConfig: "`tables[].columns.mask`, of one column",
    SinkConfig: "`sink`",
    DeltaConfig: "`sink.delta`",
    PostgresConfig: "`sink.postgres`",
    ParquetConfig: "`sink.parquet`",
    IcebergConfig: "`sink.iceberg`",
    MaintenanceConfig: "`maintenance`",
    TypesConfig: "`types`",
    SparkConfig: "`spark`",
}

PAGES: Mapping[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "configuration.md": configuration_page,
    "contracts.md": contracts_page,
    "source-options.md": options_page,
    "connector-options.md": connector_options_page,
    "types.md": types_page,
}


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")


def _field_row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
    return f"| `{name}` | {_type_text(field.annotation)} | {default} | {field.description or ''} |"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _type_text(annotation: object) -> str:
    text = annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    return f"`{_MODULES.sub('', text)}`".replace("|", "\\|")


def _sorted_errors() -> list[type[PenstockError]]:
    return sorted(_tree(PenstockError), key=lambda kind: kind.code)


def _tree(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _meaning(kind: type[PenstockError]) -> str:
    text = inspect.cleandoc(kind.__doc__ or "")
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
