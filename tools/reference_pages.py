"""Generate the reference pages from the code: `python -m tools.reference_pages docs/reference`, or `make
docs`.

The pages are committed; a test checks that they are current.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.config.model import (
    PipelineConfig,
    SparkConfig,
    TypesConfig,
)
from penstock.config.secrets import EnvReference, FileReference
from penstock.config.sink import (
    DeltaConfig,
    IcebergConfig,
    MaintenanceConfig,
    ParquetConfig,
    PostgresConfig,
    SinkConfig,
)
from penstock.config.source import PollingConfig, SourceConfig, TlsConfig
from penstock.config.tables import ColumnsConfig, MaskConfig, TableRule
from penstock.errors import PenstockError, Recovery
from tools.contracts_page import contracts_page
from tools.options_pages import connector_options_page, source_options_page
from tools.types_page import types_page

_OR = " \\| "
_REFERENCES: Mapping[type[BaseModel], str] = {EnvReference: "{env: NAME}", FileReference: "{file: PATH}"}

_FOLLOWS: Mapping[Recovery, str] = {
    Recovery.RETRY: "Penstock retries with backoff, from the same position. A single failing table is "
    "given up after some attempts.",
    Recovery.OPERATOR: "Penstock stops, or fails only the affected table, and shows a fix.",
    Recovery.FATAL: "Penstock stops, because continuing could damage data. Please report it.",
}


def errors_page() -> str:
    """Reference page of the error codes, ordered by code."""
    lines = [
        "# Error codes",
        "",
        "<!-- Generated from src/penstock/errors.py by `make docs`. -->",
        "",
        (
            "Error messages of Penstock start with one of these codes, in logs, in `penstock status` and in "
            "exceptions that Spark reports."
        ),
        "If there is a fix, it follows the message after `fix:`.",
        "",
        "The kind of an error determines what Penstock does:",
        "",
        "| kind | action |",
        "|---|---|",
        *(f"| {recovery.value} | {text} |" for recovery, text in _FOLLOWS.items()),
        "",
        "| code | error | kind | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{kind.code}` | {kind.__name__} | {kind.recovery.value} | {_meaning(kind)} |"
            for kind in _sorted_errors()
        ),
    ]
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Reference page of the configuration keys."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated from src/penstock/config by `make docs`. -->",
        "",
        "A pipeline is configured by one YAML file. Unknown keys are errors.",
        "",
        (
            "- A path is relative to the file. A `file:` URL is accepted too; other URLs, such as `s3:`, are "
            "errors."
        ),
        "- A duration is written as `500 ms`, `1 second`, `10 minutes`, `2 hours` or `7 days`.",
        "- A secret is a reference: `{env: NAME}` reads an environment variable, `{file: PATH}` a file.",
    ]
    for model, key in _MODELS.items():
        summary = inspect.cleandoc(model.__doc__ or "")
        lines += [
            "",
            f"## {key}",
            "",
            " ".join(summary.split()),
            "",
            "| key | type | default | description |",
            "|---|---|---|---|",
        ]
        lines += [_field_row(name, field) for name, field in model.model_fields.items()]
    return "\n".join(lines) + "\n"


_MODELS: Mapping[type[BaseModel], str] = {
    PipelineConfig: "Top level",
    SourceConfig: "`source`",
    PollingConfig: "`source.polling`",
    TlsConfig: "`source.tls`",
    TableRule: "`tables[]`",
    ColumnsConfig: "`tables[].columns`",
    MaskConfig: "`tables[].columns.mask.<column>`",
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
    "source-options.md": source_options_page,
    "connector-options.md": connector_options_page,
    "types.md": types_page,
}


def write_pages(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")


def _field_row(name: str, field: FieldInfo) -> str:
    return (
        f"| `{name}` | `{_type_text(field.annotation)}` | {_default_text(field)} | "
        f"{field.description or ''} |"
    )


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _type_text(annotation: Any) -> str:
    """The type as a user writes its values: allowed words instead of an enum, `mapping` for a nested
    section.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0])
    if origin is tuple:
        return f"list[{_type_text(arguments[0])}]"
    if origin is dict:
        return f"dict[{', '.join(map(_type_text, arguments))}]"
    if origin is Literal:
        return _OR.join(map(str, arguments))
    if origin in (Union, UnionType):
        return _OR.join(_type_text(each) for each in arguments if each is not NoneType)
    if issubclass(annotation, StrEnum):
        return _OR.join(annotation)
    if issubclass(annotation, BaseModel):
        return _REFERENCES.get(annotation, "mapping")
    return str(annotation.__name__)


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
