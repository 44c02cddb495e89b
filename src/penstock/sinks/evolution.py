"""What a target has to become so that it can take in changes of other shapes than its own, or that nothing but a new copy will do.

Pure. The target follows to the last of the shapes; changes of earlier ones are read as that one has them: under the names of today, and
with the values that the source gave to rows which were there when a column was added. Whatever cannot be told for certain is a reason to
copy the table anew, never a guess.

Columns that are dropped stay in the target as they are, and are null in rows that come later. If their name is given again, they make room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from penstock.change import METADATA_NAMES
from penstock.postgres.attributes import CatalogShape
from penstock.postgres.types.rows import decode_readable
from penstock.schema import Attributes, Column, TableSchema
from penstock.sinks.lineage import Numbering, Numbers, Told, trace
from penstock.sinks.origin import Origin, OriginColumn
from penstock.sinks.type_changes import TypeChange, compare_types
from penstock.sinks.views import View


class CopyAnew(Exception):
    """The target cannot follow; the words say why. Never leaves the pipeline."""


@dataclass(frozen=True, slots=True)
class AddedColumn:
    name: str
    arrow_type: pa.DataType
    fill: pa.Scalar
    """What all rows have in it that were there before, those that are kept of former times too; null or not."""


@dataclass(frozen=True, slots=True)
class Evolution:
    """The target's columns become `columns`; all at once, since names may be swapped."""

    columns: pa.Schema
    """The source's, as the target has them from then on, those that were dropped among them."""
    key: tuple[str, ...]
    origin: Origin
    renamed: Mapping[str, str]
    """By its name so far, what a column is called from then on; also those that make room."""
    added: tuple[AddedColumn, ...]
    widened: Mapping[str, pa.DataType]
    """By its name from then on."""
    dropped: tuple[str, ...]
    """Columns, by their names from then on, that the source had until now."""
    views: Mapping[TableSchema, View]

    @property
    def is_change(self) -> bool:
        """Whether the target looks different afterwards."""
        return bool(self.renamed or self.added or self.widened)


def same_views(origin: Origin, key: tuple[str, ...], versions: Collection[TableSchema]) -> dict[TableSchema, View] | None:
    """How to read changes, if all of them have the shape that the target has; None if they do not."""
    names = {column.name: column.target for column in origin.columns.values() if column.target is not None}
    for version in versions:
        if not origin.is_shape_of(version) or tuple(names.get(name) for name in version.key) != key:
            return None
    return {version: View(names, leaves_out=len(names) < len(origin.columns)) for version in versions}


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
    told: Sequence[Told] = (),
) -> Evolution:
    """From the target's `columns` to the last of `versions`, oldest first, which all are of one table; `now` was asked for after them.

    `ends`: to what the catalog has now, after all of them; no change of any other shape is still to come. `told`: what is
    known of each of `versions` from elsewhere.

    `is_fixed`: the target keeps its columns and their names, and columns that are new are left out. `is_log`: it holds changes as they
    were, so that those from before a column was added have nothing in it. Raises `CopyAnew`.
    """
    attributes = now.schema.attributes
    if attributes is None or not now.schema.columns:
        raise CopyAnew("it is gone, so that nobody can tell what became of its columns")
    last = Numbering(attributes.numbers, attributes.width)
    found = trace([len(version.columns) for version in versions], origin.numbering, last, told)
    if ends:
        versions, found = [*versions, now.schema], [*found, attributes.numbers]
    numbers = [each for each in found if each is not None]
    if len(numbers) < len(found):
        raise CopyAnew("columns went and others came, and the log does not tell which became which")
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
            pa.field(renamed.get(each.name, each.name), types.get(renamed.get(each.name, each.name), each.type)) for each in self.before
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
        """What the columns of the last shape are called in the target from then on, as far as it has them."""
        known = self.origin.columns
        if self.is_fixed:
            return {number: target for number in self._last if number in known and (target := known[number].target) is not None}
        for number, column in self._last.items():
            if number in known and known[number].target is None:
                raise CopyAnew(f"column {column.name!r} was left out until now")
        return {number: column.name for number, column in self._last.items()}

    @cached_property
    def _dropped(self) -> dict[int, str]:
        """Columns that the target has, by their names there, and the source has no more."""
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
        """What Spark cannot tell apart, or we need for ourselves, is refused when the table is copied, with its reason."""
        folded = [name.casefold() for name in self._targets.values()]
        if len(set(folded)) < len(folded) or METADATA_NAMES & set(folded):
            raise CopyAnew("a column has a name that the target cannot have")

    def _check_key(self) -> None:
        """A shape without a key shows whole rows, and may come between two that have one; another key tells other rows apart."""
        known = self.origin.numbers_of(self.key)
        if len(known) != len(self.key) or any(shape.key and shape.key != known for shape in self.shapes) or self.shapes[-1].key != known:
            raise CopyAnew("its key changed")
        if not self.key and self._dropped:
            raise CopyAnew("it lost a column, and its rows are told apart by all of them")

    def _types(self) -> dict[str, pa.DataType]:
        """By name, the types of the columns that hold more than before."""
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
                    raise CopyAnew(f"column {column.name!r} changed its type")
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
        """What the source gave to rows that were there when the column was added."""
        column = self._last[number]
        if self.is_log:
            return pa.scalar(None, column.arrow_type)
        current = dict(zip(self.attributes.numbers, self.now.schema.columns, strict=True)).get(number)
        unknown = CopyAnew(f"nobody can tell what the rows that were there have in column {column.name!r}, which was added")
        held = (column.type_oid, column.type_modifier, column.arrow_type)
        if current is None or compare_types(held, current, is_rewritten=self._is_rewritten) is not TypeChange.NONE:
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
        columns = {number: OriginColumn.of(column, self._targets.get(number)) for number, column in self._last.items()}
        followed = Origin(columns, max(self.origin.width, *columns), self.origin.heap)
        return Origin(columns, followed.width, self.attributes.heap) if followed.is_same(self.now.schema) else followed

    def _views(self) -> dict[TableSchema, View]:
        numbers: dict[TableSchema, Numbers] = {}
        for shape in self.shapes:
            if numbers.setdefault(shape.version, shape.numbers) != shape.numbers:
                raise CopyAnew("a column was dropped and made again with the same name")
        return {shape.version: self._view(shape) for shape in self.shapes}

    def _view(self, shape: _Shape) -> View:
        names = {column.name: target for number, column in shape.columns.items() if (target := self._target(number, column)) is not None}
        later = (added for number, added in self._added.items() if number not in shape.columns and added.fill.is_valid)
        return View(names, {added.name: added.fill for added in later}, leaves_out=len(names) < len(shape.columns))

    def _target(self, number: int, column: Column) -> str | None:
        """What a column that was there once is called in the target; None if the target has nothing that could hold it."""
        if number in self._last or number not in self._dropped:
            return self._targets.get(number)
        name, known = self._dropped[number], self.origin.columns[number]
        # Where values are text, only the declarations tell types apart.
        is_same = (known.type_oid, known.type_modifier) == (column.type_oid, column.type_modifier)
        return self._renamed.get(name, name) if is_same and self.before.field(name).type == column.arrow_type else None


def _free(name: str, taken: Collection[str]) -> str:
    number = 1
    while f"{name}__dropped_{number}".casefold() in taken:
        number += 1
    return f"{name}__dropped_{number}"
