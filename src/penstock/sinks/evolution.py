"""Schema evolution: plan how the columns of a target change when the source's schema changed, or decide that
the table must be resynced.

All functions are pure. The target gets the columns of the last schema version. Changes of earlier versions
are mapped to these columns: columns get their current names, and columns that were added later get their
default value. If the WAL stream does not show which columns were added, dropped or renamed, the table is
resynced.

`ALTER … TYPE … USING` can replace any value, and the WAL stream does not show the new values. If the server
did not rewrite the rows, the values are unchanged. A change to a wider integer or float type always makes the
server rewrite the rows. Penstock treats such a change as value-preserving, since it almost always is.

Dropped columns stay in the target and are null in later rows. If a later column has the same name, the
dropped column is renamed in the target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.postgres.catalog import CatalogShape
from penstock.postgres.types.registry import BUILTIN_TYPES
from penstock.postgres.types.rows import decode_readable
from penstock.postgres.types.scalars import declared_decimal
from penstock.schema import Attributes, Column, TableSchema
from penstock.sinks.lineage import DdlHint, Numbering, Numbers, Origin, OriginColumn, trace
from penstock.sinks.row_values import View

_INTEGERS = tuple(BUILTIN_TYPES[name][0] for name in ("int2", "int4", "int8"))
_FLOATS = tuple(BUILTIN_TYPES[name][0] for name in ("float4", "float8"))
_NUMERIC = BUILTIN_TYPES["numeric"][0]
_TEXTS = frozenset(BUILTIN_TYPES[name][0] for name in ("text", "varchar"))


class TypeChange(Enum):
    NONE = auto()
    """Same type, all values unchanged."""
    WIDER = auto()
    """A wider type, all values unchanged."""
    OTHER = auto()
    """Any other change: values may have changed."""


def compare_types(before: tuple[int, int, pa.DataType], after: Column, *, is_rewritten: bool) -> TypeChange:
    """Compare an earlier definition of a column, `before` (type OID, modifier, Arrow type), with a later one.
    `is_rewritten`: the server has rewritten all rows since the earlier definition.
    """
    oid, modifier, arrow_type = before
    if (oid, modifier, arrow_type) == (after.type_oid, after.type_modifier, after.arrow_type):
        return TypeChange.NONE
    if _is_wider_number(oid, after.type_oid):
        return TypeChange.WIDER
    if arrow_type == after.arrow_type:
        alike = oid == after.type_oid or {oid, after.type_oid} <= _TEXTS
        return TypeChange.NONE if alike and not is_rewritten else TypeChange.OTHER
    is_declared = oid == after.type_oid == _NUMERIC and arrow_type == declared_decimal(modifier)
    if is_declared and not is_rewritten and _is_wider_decimal(arrow_type, after.arrow_type):
        # With a type from `types:`, the target would lack larger values, which are null in it.
        return TypeChange.WIDER
    return TypeChange.OTHER


def _is_wider_number(before: int, after: int) -> bool:
    return any(
        before in kind and after in kind and kind.index(before) < kind.index(after)
        for kind in (_INTEGERS, _FLOATS)
    )


def _is_wider_decimal(before: pa.DataType, after: pa.DataType) -> bool:
    if not pa.types.is_decimal128(before) or not pa.types.is_decimal128(after):
        return False
    return bool(before.scale == after.scale and before.precision < after.precision)


class ResyncRequired(Exception):
    """The target cannot follow a schema change; the message has the reason. Handled inside the pipeline."""


@dataclass(frozen=True, slots=True)
class AddedColumn:
    name: str
    arrow_type: pa.DataType
    fill: pa.Scalar
    """The default value for existing rows, including rows that a lookup reads from older data files; may be
    null.
    """


@dataclass(frozen=True, slots=True)
class Evolution:
    """The plan of a schema change of a target. All columns change at once, since two columns may swap their
    names.
    """

    columns: pa.Schema
    """The columns after the change, without those that the mode adds. Includes columns that the source has
    dropped.
    """
    key: tuple[str, ...]
    origin: Origin
    renamed: Mapping[str, str]
    """The new name of each renamed column, by its old name. Includes dropped columns whose name is used
    again.
    """
    added: tuple[AddedColumn, ...]
    widened: Mapping[str, pa.DataType]
    """The new type of each widened column, by its new name."""
    dropped: tuple[str, ...]
    """Columns that the source drops with this schema change, by their new names in the target."""
    views: Mapping[TableSchema, View]

    @property
    def is_change(self) -> bool:
        """Whether the columns of the target change."""
        return bool(self.renamed or self.added or self.widened)


def same_views(
    columns: pa.Schema, key: tuple[str, ...], origin: Origin, versions: Collection[TableSchema]
) -> dict[TableSchema, View] | None:
    """Return a view for each of `versions` if all of them have the columns and the key of the target; None if
    one of them differs.
    """
    names = {column.name: column.target for column in origin.columns.values() if column.target is not None}
    for version in versions:
        is_same_key = tuple(names.get(name) for name in version.key) == key
        if not is_same_key or not origin.is_shape_of(version) or not has_types(columns, origin, version):
            return None
    return {version: View(names, leaves_out=len(names) < len(origin.columns)) for version in versions}


def has_types(columns: pa.Schema, origin: Origin, schema: TableSchema) -> bool:
    """Whether the target's `columns` have the Arrow types of `schema`, which has the same names and declared
    types as `origin`. The Arrow types differ if `types:` was changed, or if this version of Penstock maps a
    Postgres type to another Arrow type than the version that created the target.
    """
    pairs = zip(origin.columns.values(), schema.columns, strict=True)
    return all(
        known.target is None or columns.field(known.target).type == column.arrow_type
        for known, column in pairs
    )


def plan_evolution(
    columns: pa.Schema,
    key: tuple[str, ...],
    origin: Origin,
    versions: Sequence[TableSchema],
    now: CatalogShape,
    *,
    is_fixed: bool = False,
    is_log: bool = False,
    ends: bool = False,
    hints: Sequence[DdlHint] = (),
) -> Evolution:
    """Plan the change from the target's `columns` to the columns of the last of `versions`, which are oldest
    first. `now` is the table in the catalog, read after these versions. Raises `ResyncRequired` if the target
    cannot follow the change.

    `ends`: no later change has other columns than the catalog, so the target gets the columns of the catalog.
    `hints` has the hint of the event trigger for each of `versions`.

    `is_fixed`: the target keeps its columns and names, and ignores new columns. `is_log`: each row of the
    target is a change, so an added column is null in older rows.
    """
    attributes = now.schema.attributes
    if attributes is None or not now.schema.columns:
        raise ResyncRequired("it was dropped, so the changes of its columns are unknown")
    last = Numbering(attributes.numbers, attributes.width)
    found = trace([len(version.columns) for version in versions], origin.numbering, last, hints)
    if ends:
        versions, found = [*versions, now.schema], [*found, attributes.numbers]
    numbers = [each for each in found if each is not None]
    if len(numbers) < len(found):
        raise ResyncRequired("columns were dropped and added, and the log does not show which were renamed")
    shapes = [_Shape(*each) for each in zip(versions, numbers, strict=True)]
    return _Plan(columns, key, origin, shapes, now, attributes, is_fixed, is_log).build()


@dataclass(frozen=True)
class _Shape:
    version: TableSchema
    numbers: Numbers

    @cached_property
    def columns(self) -> dict[int, Column]:
        return dict(zip(self.numbers, self.version.columns, strict=True))

    @cached_property
    def key(self) -> frozenset[int]:
        return frozenset(number for number, column in self.columns.items() if column.name in self.version.key)


@dataclass(frozen=True)
class _Plan:
    before: pa.Schema
    key: tuple[str, ...]
    origin: Origin
    shapes: Sequence[_Shape]
    now: CatalogShape
    attributes: Attributes
    is_fixed: bool
    is_log: bool

    def build(self) -> Evolution:
        self._check_key()
        self._check_names()
        types = self._types()
        renamed = self._renamed
        kept = [
            pa.field(
                renamed.get(each.name, each.name), types.get(renamed.get(each.name, each.name), each.type)
            )
            for each in self.before
        ]
        added = tuple(self._added.values())
        return Evolution(
            pa.schema([*kept, *(pa.field(each.name, each.arrow_type) for each in added)]),
            tuple(self._targets[number] for number in sorted(self.shapes[-1].key)),
            self._followed(),
            renamed,
            added,
            types,
            tuple(renamed.get(name, name) for name in self._dropped.values()),
            self._views(),
        )

    @cached_property
    def _last(self) -> dict[int, Column]:
        return self.shapes[-1].columns

    @cached_property
    def _is_rewritten(self) -> bool:
        return self.attributes.heap != self.origin.heap

    @cached_property
    def _targets(self) -> dict[int, str]:
        """The names of the last version's columns in the target, by column number. Columns that the target
        does not have are left out.
        """
        known = self.origin.columns
        if self.is_fixed:
            return {
                number: target
                for number in self._last
                if number in known and (target := known[number].target) is not None
            }
        for number, column in self._last.items():
            if number in known and known[number].target is None:
                raise ResyncRequired(f"column {column.name!r} was not copied until now")
        return {number: column.name for number, column in self._last.items()}

    @cached_property
    def _dropped(self) -> dict[int, str]:
        """Names in the target of the columns that the last version no longer has, by column number."""
        return {
            number: column.target
            for number, column in self.origin.columns.items()
            if number not in self._last and column.target is not None
        }

    @cached_property
    def _renamed(self) -> dict[str, str]:
        renamed = {
            column.target: self._targets[number]
            for number, column in self.origin.columns.items()
            if column.target is not None and number in self._targets
        }
        taken = {name.casefold() for name in self._targets.values()}
        staying = [name for name in self.before.names if name not in renamed]
        taken_by_all = taken | {name.casefold() for name in staying}
        for name in staying:
            if name.casefold() in taken:
                renamed[name] = _free(name, taken_by_all)
                taken_by_all.add(renamed[name].casefold())
        return {old: new for old, new in renamed.items() if old != new}

    def _check_names(self) -> None:
        """Raise `ResyncRequired` for names that Spark cannot distinguish or that Penstock reserves. The
        resync then rejects the table with the reason.
        """
        folded = [name.casefold() for name in self._targets.values()]
        if len(set(folded)) < len(folded) or METADATA_NAMES & set(folded):
            raise ResyncRequired("a column has a name that the target does not allow")

    def _check_key(self) -> None:
        """Raise `ResyncRequired` if the key changed, because rows are then identified differently. A version
        without a key between two versions with the same key is accepted, because its changes have whole rows.
        """
        known = self.origin.numbers_of(self.key)
        if (
            len(known) != len(self.key)
            or any(shape.key and shape.key != known for shape in self.shapes)
            or self.shapes[-1].key != known
        ):
            raise ResyncRequired("its key changed")
        if not self.key and self._dropped:
            raise ResyncRequired("it lost a column, and all columns together identify its rows")

    def _types(self) -> dict[str, pa.DataType]:
        """The new types of widened columns, by their name in the target."""
        widened: dict[str, pa.DataType] = {}
        for number, target in self._targets.items():
            known = self.origin.columns.get(number)
            history = [shape.columns[number] for shape in self.shapes if number in shape.columns]
            if known is None:
                first = history[0]
                held = (first.type_oid, first.type_modifier, first.arrow_type)
            else:
                assert known.target is not None
                held = (known.type_oid, known.type_modifier, self.before.field(known.target).type)
            for column in history:
                change = compare_types(held, column, is_rewritten=self._is_rewritten)
                if change is TypeChange.OTHER or (change is TypeChange.WIDER and self.is_fixed):
                    raise ResyncRequired(f"column {column.name!r} changed its type")
                if change is TypeChange.WIDER and known is not None:
                    widened[target] = column.arrow_type
                held = (column.type_oid, column.type_modifier, column.arrow_type)
        return widened

    @cached_property
    def _added(self) -> dict[int, AddedColumn]:
        return {
            number: AddedColumn(target, self._last[number].arrow_type, self._fill(number))
            for number, target in self._targets.items()
            if number not in self.origin.columns
        }

    def _fill(self, number: int) -> pa.Scalar:
        """The default value of a column for rows that existed when it was added. Raises `ResyncRequired` if
        it is unknown.
        """
        column = self._last[number]
        if self.is_log:
            return pa.scalar(None, column.arrow_type)
        current = dict(zip(self.attributes.numbers, self.now.schema.columns, strict=True)).get(number)
        unknown = ResyncRequired(f"the value of existing rows in the added column {column.name!r} is unknown")
        held = (column.type_oid, column.type_modifier, column.arrow_type)
        if (
            current is None
            or compare_types(held, current, is_rewritten=self._is_rewritten) is not TypeChange.NONE
        ):
            raise unknown
        missing = self.now.missing.get(current.name)
        if missing is None:
            if self._is_rewritten:
                raise unknown
            return pa.scalar(None, column.arrow_type)
        if missing.text is None:
            raise unknown
        decoded, _, _ = decode_readable(pa.array([missing.text], pa.string()), column)
        if decoded.inexact is not None and decoded.inexact.true_count:
            raise unknown
        return decoded.values[0]

    def _followed(self) -> Origin:
        columns = {
            number: OriginColumn.of(column, self._targets.get(number))
            for number, column in self._last.items()
        }
        followed = Origin(columns, max(self.origin.width, *columns), self.origin.heap)
        return (
            Origin(columns, followed.width, self.attributes.heap)
            if followed.is_same(self.now.schema)
            else followed
        )

    def _views(self) -> dict[TableSchema, View]:
        numbers: dict[TableSchema, Numbers] = {}
        for shape in self.shapes:
            if numbers.setdefault(shape.version, shape.numbers) != shape.numbers:
                raise ResyncRequired("a column was dropped and added again with the same name")
        return {shape.version: self._view(shape) for shape in self.shapes}

    def _view(self, shape: _Shape) -> View:
        names = {
            column.name: target
            for number, column in shape.columns.items()
            if (target := self._target(number, column)) is not None
        }
        later = (
            added
            for number, added in self._added.items()
            if number not in shape.columns and added.fill.is_valid
        )
        return View(
            names, {added.name: added.fill for added in later}, leaves_out=len(names) < len(shape.columns)
        )

    def _target(self, number: int, column: Column) -> str | None:
        """The name in the target of a column of an earlier version; None if the target has no column
        for it.
        """
        if number in self._last or number not in self._dropped:
            return self._targets.get(number)
        name, known = self._dropped[number], self.origin.columns[number]
        # Several Postgres types are stored as text; only the declared types distinguish them.
        is_same = (known.type_oid, known.type_modifier) == (column.type_oid, column.type_modifier)
        return (
            self._renamed.get(name, name)
            if is_same and self.before.field(name).type == column.arrow_type
            else None
        )


def _free(name: str, taken: Collection[str]) -> str:
    number = 1
    while f"{name}__dropped_{number}".casefold() in taken:
        number += 1
    return f"{name}__dropped_{number}"
