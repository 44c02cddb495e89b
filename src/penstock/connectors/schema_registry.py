"""Register table schemas as Avro in a schema registry, over Confluent's HTTP API.

All columns of a table are nullable in a change batch, and nullable columns have the default null. So adding
or removing a column keeps the schemas compatible in both directions. Avro allows fewer characters in names
than SQL: other characters are escaped, and the exact name is kept under `penstock.name`. Equal schemas have
equal text, since registries compare texts.

There are three operations: register a schema, look one up, check compatibility. Each request has a time
limit. A failure raises one of three errors: `RegistryError` (no response), `RegistryRefusedError` (the
registry rejects the request) or `SchemaIncompatibleError`.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pyarrow as pa
from typing_extensions import override

from penstock.change import change_schema
from penstock.connectors.settings import RegistryAddress
from penstock.contracts.schemas import Compatibility, RegisteredSchema, SchemaRegistryAware
from penstock.errors import ConnectorError, RegistryError, RegistryRefusedError, SchemaIncompatibleError
from penstock.schema import TableName, TableSchema

Json: TypeAlias = "str | int | list[Json] | dict[str, Json] | None"

EXACT_NAME = "penstock.name"

# Matches the places to escape: a character that Avro does not allow, the beginning of a name that starts with
# a digit, and an underscore that begins text that looks like an escape.
_UNFIT = re.compile(r"[^A-Za-z0-9_]|^(?=[0-9])|_(?=x[0-9A-F]*(?:_|[^A-Za-z0-9_]))")

_PLAIN: tuple[tuple[Callable[[pa.DataType], bool], Json], ...] = (
    (pa.types.is_null, "null"),
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_integer(kind) and kind.bit_width <= 32 and not pa.types.is_uint32(kind), "int"),
    (pa.types.is_integer, "long"),
    (lambda kind: pa.types.is_float16(kind) or pa.types.is_float32(kind), "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "string"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "bytes"),
    (pa.types.is_date32, {"type": "int", "logicalType": "date"}),
    (pa.types.is_time64, {"type": "long", "logicalType": "time-micros"}),
    (pa.types.is_interval, "string"),
    (pa.types.is_duration, "long"),
)


def avro_text(table: TableName, schema: pa.Schema) -> str:
    """The Avro schema of a table's rows, as a record with the table's name."""
    name, namespace = avro_name(table.name), avro_name(table.schema)
    record: dict[str, Json] = {
        "type": "record",
        "name": name,
        "namespace": namespace,
        "fields": _fields(schema, name),
    }
    if (name, namespace) != (table.name, table.schema):
        record[EXACT_NAME] = str(table)
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def avro_name(name: str) -> str:
    """A valid Avro name. Different names get different Avro names."""

    def escaped(match: re.Match[str]) -> str:
        return f"_x{ord(match[0]):X}_" if match[0] else "_x_"

    return _UNFIT.sub(escaped, name)


def _fields(fields: Iterable[pa.Field], path: str) -> list[Json]:
    found: list[Json] = []
    taken: set[str] = set()
    for field in fields:
        name = avro_name(field.name)
        while name in taken:  # a column of the table may have the name of a metadata column
            name += "_"
        taken.add(name)
        kind = _type(field.type, f"{path}_{name}")
        document: dict[str, Json] = {
            "name": name,
            "type": ["null", kind] if field.nullable and kind != "null" else kind,
        }
        if field.nullable:
            document["default"] = None
        if name != field.name:
            document[EXACT_NAME] = field.name
        found.append(document)
    return found


def _type(kind: pa.DataType, path: str) -> Json:
    """The Avro type. `path` becomes the name of the record for a struct, because Avro requires a name for
    every record.
    """
    for fits, avro in _PLAIN:
        if fits(kind):
            return avro
    if pa.types.is_decimal(kind):
        is_fit = 0 <= kind.scale <= kind.precision
        return (
            {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
            if is_fit
            else "string"
        )
    if pa.types.is_timestamp(kind):
        return {"type": "long", "logicalType": "timestamp-micros" if kind.tz else "local-timestamp-micros"}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return {"type": "array", "items": _nullable(_type(kind.value_type, path))}
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return {"type": "map", "values": _nullable(_type(kind.item_type, path))}
    if pa.types.is_struct(kind):
        return {
            "type": "record",
            "name": path,
            "fields": _fields([kind.field(place) for place in range(kind.num_fields)], path),
        }
    raise ConnectorError(
        f"there is no Avro type for {kind}", hint="leave the column out of the publication's column list"
    )


def _nullable(kind: Json) -> Json:
    return kind if kind == "null" else ["null", kind]


_CONTENT = "application/vnd.schemaregistry.v1+json"
_UNKNOWN = frozenset({40401, 40402, 40403})
"""Error codes for an unknown subject, version or schema."""
_MOST_BYTES = 64 << 20


class SchemaRegistry:
    """HTTP client. It holds no connection and may be used by any thread."""

    def __init__(self, address: RegistryAddress) -> None:
        self._address = address

    def register(self, subject: str, text: str) -> RegisteredSchema:
        """Add a schema to a subject if the subject does not have it yet; returns the registered schema."""
        body = {"schema": text, "schemaType": "AVRO"}
        added = self._ask("POST", f"subjects/{_part(subject)}/versions", body)
        # This response has no version. Looking up the schema by its text returns the version, even if it is
        # not the latest.
        found = self._ask("POST", f"subjects/{_part(subject)}", body)
        if added is None or found is None:
            raise RegistryError(f"the registry accepted a schema of {subject} but does not find it")
        return _registered(subject, {"schema": text, **found, "id": added.get("id")})

    def look_up(self, subject: str, version: int | None = None) -> RegisteredSchema | None:
        """The latest schema of a subject, or a given version; None if there is none."""
        found = self._ask(
            "GET", f"subjects/{_part(subject)}/versions/{'latest' if version is None else version}"
        )
        return None if found is None else _registered(subject, found)

    def check(self, subject: str, text: str) -> Compatibility:
        """Whether the subject's compatibility rule allows the schema as its latest."""
        body = {"schema": text, "schemaType": "AVRO"}
        found = self._ask(
            "POST", f"compatibility/subjects/{_part(subject)}/versions/latest?verbose=true", body
        )
        if found is None:  # a subject without schemas
            return Compatibility(True)
        if not isinstance(found.get("is_compatible"), bool):
            raise RegistryError(
                f"the registry's response does not tell whether the schema of {subject} is compatible"
            )
        reasons = [*found.get("messages", ()), found.get("reason")]
        return Compatibility(found["is_compatible"], tuple(str(reason) for reason in reasons if reason))

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """The response; None if the registry does not have the object."""
        address = self._address
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            f"{address.url}/{path}", data, {"Accept": _CONTENT, "Content-Type": _CONTENT}, method=method
        )
        if address.user:
            password = address.password.reveal() if address.password is not None else ""
            login = b64encode(f"{address.user}:{password}".encode()).decode()
            request.add_unredirected_header(
                "Authorization", f"Basic {login}"
            )  # for this server only, not for a redirect
        try:
            with urlopen(request, timeout=address.timeout_seconds) as answer:
                document = json.loads(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                self._refused(error)
            return None
        except (OSError, HTTPException, ValueError) as error:
            raise RegistryError(
                f"the schema registry at {address.url} does not respond: {_reason(error)}"
            ) from error
        if not isinstance(document, dict):
            raise RegistryError(f"the schema registry at {address.url} sent an invalid response")
        return document

    def _refused(self, error: HTTPError) -> None:
        """Raise the error for a response. Returns normally only if the object does not exist."""
        where = f"the schema registry at {self._address.url}"
        code, message = _complaint(error)
        if error.code == 404 and code in _UNKNOWN:
            return
        if error.code == 409:
            raise SchemaIncompatibleError(
                f"{where} rejects the schema: {message}",
                hint="alter the table compatibly, or loosen the subject's compatibility: PUT "
                "/config/<subject>",
            ) from error
        if error.code in (401, 403):
            raise RegistryRefusedError(
                f"{where} rejects the login", hint="check registryUser and registryPassword"
            ) from error
        if error.code == 404:
            raise RegistryRefusedError(
                f"{where} has no such API: {message}",
                hint="check registryUrl; Apicurio has the API under /apis/ccompat/v7",
            ) from error
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise RegistryRefusedError(
                f"{where} rejects the request: {message}", hint="see the registry's log"
            ) from error
        raise RegistryError(f"{where} responds with {error.code}: {message}") from error


class TablesInRegistry(SchemaRegistryAware):
    """The tables of a connector, each with its own subject."""

    def __init__(
        self, address: RegistryAddress, schema_of: Callable[[TableName], TableSchema | None]
    ) -> None:
        self._registry = SchemaRegistry(address)
        self._prefix = address.prefix
        self._schema_of = schema_of

    @override
    def subject_of(self, partition: str) -> str:
        """The subject of a table: as in Confluent's TopicNameStrategy, with the table instead of the
        topic.
        """
        return f"{self._prefix}{partition}-value"

    @override
    def register_schema(self, partition: str) -> RegisteredSchema:
        return self._registry.register(self.subject_of(partition), self._text(partition))

    @override
    def look_up_schema(self, partition: str, version: int | None = None) -> RegisteredSchema | None:
        return self._registry.look_up(self.subject_of(partition), version)

    @override
    def check_compatibility(self, partition: str) -> Compatibility:
        return self._registry.check(self.subject_of(partition), self._text(partition))

    def _text(self, partition: str) -> str:
        try:
            table = TableName.parse(partition)
        except ValueError as error:
            raise ConnectorError(
                str(error), hint="name a partition of the connector, such as public.orders"
            ) from error
        schema = self._schema_of(table)
        if schema is None:
            raise ConnectorError(
                f"the schema of {partition} is unknown", hint="name a table that the connector captures"
            )
        return avro_text(table, change_schema(schema))


def _registered(subject: str, document: Mapping[str, Any]) -> RegisteredSchema:
    try:
        return RegisteredSchema(
            subject, int(document["id"]), int(document["version"]), str(document["schema"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RegistryError(f"the registry sent an invalid response about {subject}") from error


def _complaint(error: HTTPError) -> tuple[int | None, str]:
    try:
        document = json.loads(error.read(1 << 16))
        return document.get("error_code"), str(document.get("message", ""))
    except (OSError, HTTPException, ValueError, AttributeError):
        return None, error.reason


def _reason(error: Exception) -> str:
    """The reason of a failed request, without the URL (the error's message already has it) and without bytes
    of the response.
    """
    return str(getattr(error, "reason", None) or type(error).__name__)


def _part(subject: str) -> str:
    return quote(subject, safe="")
