"""A schema registry over HTTP, in the API that Confluent's has and others speak too.

Three questions: register a schema, look one up, may one follow the others. Each is bounded in time. What the registry says becomes one of
three errors: no answer (`RegistryError`), a refusal (`RegistryRefusedError`), a schema that may not follow (`SchemaIncompatibleError`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from typing_extensions import override

from penstock.change import change_schema
from penstock.connectors.avro import avro_text
from penstock.connectors.settings import RegistryAddress
from penstock.contracts.schemas import Compatibility, RegisteredSchema, SchemaRegistryAware
from penstock.errors import ConnectorError, RegistryError, RegistryRefusedError, SchemaIncompatibleError
from penstock.schema import TableName, TableSchema

_CONTENT = "application/vnd.schemaregistry.v1+json"
_UNKNOWN = frozenset({40401, 40402, 40403})
"""No such subject, version, schema."""
_MOST_BYTES = 64 << 20


class SchemaRegistry:
    """The client. Holds no connection; any thread may ask."""

    def __init__(self, address: RegistryAddress) -> None:
        self._address = address

    def register(self, subject: str, text: str) -> RegisteredSchema:
        """Add a schema to a subject, if it is not there yet."""
        body = {"schema": text, "schemaType": "AVRO"}
        added = self._ask("POST", f"subjects/{_part(subject)}/versions", body)
        # The answer has no version; asking for the schema itself gives it, also where it has been there for long.
        found = self._ask("POST", f"subjects/{_part(subject)}", body)
        if added is None or found is None:
            raise RegistryError(f"the registry took a schema of {subject} and does not know it")
        return _registered(subject, {"schema": text, **found, "id": added.get("id")})

    def look_up(self, subject: str, version: int | None = None) -> RegisteredSchema | None:
        """The latest schema of a subject, or a certain version; None if there is none."""
        found = self._ask("GET", f"subjects/{_part(subject)}/versions/{'latest' if version is None else version}")
        return None if found is None else _registered(subject, found)

    def look_up_id(self, id: int) -> str | None:
        """The text of a schema by the number that records carry; None if there is none."""
        found = self._ask("GET", f"schemas/ids/{id}")
        return None if found is None else str(found.get("schema", ""))

    def check(self, subject: str, text: str) -> Compatibility:
        """Whether the schema may become the latest of the subject, by the subject's own rule."""
        body = {"schema": text, "schemaType": "AVRO"}
        found = self._ask("POST", f"compatibility/subjects/{_part(subject)}/versions/latest?verbose=true", body)
        if found is None:  # nothing is there that it could be at odds with
            return Compatibility(True)
        if not isinstance(found.get("is_compatible"), bool):
            raise RegistryError(f"the registry does not say whether the schema of {subject} is compatible")
        reasons = [*found.get("messages", ()), found.get("reason")]
        return Compatibility(found["is_compatible"], tuple(str(reason) for reason in reasons if reason))

    def _ask(self, method: str, path: str, body: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """The answer; None for what the registry does not have."""
        address = self._address
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{address.url}/{path}", data, {"Accept": _CONTENT, "Content-Type": _CONTENT}, method=method)
        if address.user:
            password = address.password.reveal() if address.password is not None else ""
            login = b64encode(f"{address.user}:{password}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {login}")  # for this server, and for none that it names
        try:
            with urlopen(request, timeout=address.timeout_seconds) as answer:
                document = json.loads(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                self._refused(error)
            return None
        except (OSError, HTTPException, ValueError) as error:
            raise RegistryError(f"the schema registry at {address.url} does not answer: {_reason(error)}") from error
        if not isinstance(document, dict):
            raise RegistryError(f"the schema registry at {address.url} gives an answer that is not one")
        return document

    def _refused(self, error: HTTPError) -> None:
        """Returns only for what is not there."""
        where = f"the schema registry at {self._address.url}"
        code, message = _complaint(error)
        if error.code == 404 and code in _UNKNOWN:
            return
        if error.code == 409:
            raise SchemaIncompatibleError(
                f"{where} refuses the schema: {message}",
                hint="alter the table so that old readers can go on, or loosen the subject's compatibility: PUT /config/<subject>",
            ) from error
        if error.code in (401, 403):
            raise RegistryRefusedError(f"{where} refuses the login", hint="check registryUser and registryPassword") from error
        if error.code == 404:
            raise RegistryRefusedError(
                f"{where} has no such API: {message}", hint="check registryUrl; Apicurio has the API under /apis/ccompat/v7"
            ) from error
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise RegistryRefusedError(f"{where} refuses the request: {message}", hint="see the registry's log") from error
        raise RegistryError(f"{where} answers {error.code}: {message}") from error


class TablesInRegistry(SchemaRegistryAware):
    """The tables of a connector, each with a subject of its own."""

    def __init__(self, address: RegistryAddress, schema_of: Callable[[TableName], TableSchema | None]) -> None:
        self._registry = SchemaRegistry(address)
        self._prefix = address.prefix
        self._schema_of = schema_of

    @override
    def subject_of(self, partition: str) -> str:
        """As Confluent's strategy by topic has it, with the table in the topic's place."""
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
            raise ConnectorError(str(error), hint="name a partition of the connector, such as public.orders") from error
        schema = self._schema_of(table)
        if schema is None:
            raise ConnectorError(f"the shape of {partition} is not known", hint="name a table that the connector captures")
        return avro_text(table, change_schema(schema))


def _registered(subject: str, document: Mapping[str, Any]) -> RegisteredSchema:
    try:
        return RegisteredSchema(subject, int(document["id"]), int(document["version"]), str(document["schema"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RegistryError(f"the registry gives an answer about {subject} that is not one") from error


def _complaint(error: HTTPError) -> tuple[int | None, str]:
    try:
        document = json.loads(error.read(1 << 16))
        return document.get("error_code"), str(document.get("message", ""))
    except (OSError, HTTPException, ValueError, AttributeError):
        return None, error.reason


def _reason(error: Exception) -> str:
    """Without the URL, which is said already, and without bytes of an answer."""
    return str(getattr(error, "reason", None) or type(error).__name__)


def _part(subject: str) -> str:
    return quote(subject, safe="")
