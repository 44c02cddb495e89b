"""Dead letters, case by case: rejected rows and the rows after them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from penstock.change import ChangeCounts
from penstock.cli.main import app
from penstock.config.model import load_config
from penstock.config.policies import RefusedPolicy
from penstock.errors import NoTablesError, SpoolCorruptError
from penstock.pipeline.dead_letters.files import CHANGES_SUFFIX, LETTERS_SUFFIX
from penstock.pipeline.dead_letters.rejections import DEAD_LETTER_SCHEMA
from penstock.pipeline.dead_letters.store import DeadLetterStore
from penstock.pipeline.status import inspect_status
from penstock.pipeline.table_overrides import load_overrides
from penstock.pipeline.table_states import TableState
from penstock.position import Position
from penstock.sinks.base import TableChanges
from penstock.sinks.modes import Mode
from penstock.transforms.staging import plan_stages, stage
from penstock.transforms.transform import Transform
from tests.support.memory_pipeline import (
    BEYOND,
    LONG,
    Died,
    MemoryPipeline,
    dying_writes,
    epoch,
    key,
    memory_pipeline,
    row,
)
from tests.support.sinks.history import PLAIN
from tests.support.sinks.source import Source, Value


@pytest.fixture
def made() -> Iterator[MemoryPipeline]:
    """Rows 1 to 3 are in the target."""
    source = Source(PLAIN, [row(number) for number in (1, 2, 3)])
    rows = [
        {"id": number, "note": "n", "amount": Decimal("1.5"), "seen": None, "blob": None, "_exact": None}
        for number in (1, 2, 3)
    ]
    with memory_pipeline(source, Mode.MIRROR, rows) as opened:
        yield opened


def replay(made: MemoryPipeline) -> None:
    made.box.order_replay(made.name)
    made.apply(made.idle())


def amounts(made: MemoryPipeline) -> dict[int, object]:
    return {
        each["id"]: each["amount"] if each["_exact"] is None else dict(each["_exact"])["amount"]
        for each in made.sink.list.rows
    }


def test_C08_a_dead_letter_has_the_reason_the_position_and_the_exact_values(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND, 'a "b" é'))
    epoch(made)
    found = pq.read_table(made.box.store.directory)  # the directory, as any reader would read it
    assert found.schema.equals(DEAD_LETTER_SCHEMA)
    (letter,) = found.to_pylist()
    assert (letter["table"], letter["status"], letter["code"], letter["change_type"]) == (
        "public.plain",
        "open",
        "PEN-1411",
        "insert",
    )
    assert "'amount'" in letter["reason"]
    assert json.loads(letter["key"]) == {"id": 4}
    assert json.loads(letter["row"]) == {
        "id": 4,
        "note": 'a "b" é',
        "amount": "7e50",
        "seen": None,
        "blob": None,
    }
    assert letter["position"] == str(Position.of(made.source.position))
    assert (letter["commit_version"], letter["ordinal"], letter["settled_version"]) == (
        made.source.position,
        0,
        None,
    )
    assert letter["commit_timestamp"].tzinfo is not None
    assert letter["refused_at"] <= datetime.now(UTC)
    assert amounts(made).keys() == {1, 2, 3}


def test_C08_of_a_row_whose_update_is_refused_the_target_keeps_the_state_before(made: MemoryPipeline) -> None:
    made.source.update(key(1), {"amount": BEYOND})
    made.source.update(key(2), {"amount": Value(Decimal(9))})
    epoch(made)
    assert amounts(made) == {1: Decimal("1.5"), 2: Decimal(9), 3: Decimal("1.5")}


@pytest.mark.parametrize("later", ["update", "delete", "truncate", "key change"])
def test_C08_a_later_change_supersedes_a_dead_letter_so_that_no_replay_restores_the_old_row(
    made: MemoryPipeline, later: str
) -> None:
    made.source.update(key(1), {"amount": BEYOND})
    epoch(made)
    if later == "update":
        made.source.update(key(1), {"amount": Value(Decimal(5))})
    elif later == "delete":
        made.source.delete(key(1))
    elif later == "truncate":
        made.source.truncate()
    else:
        made.source.update(key(1), {"id": Value(7), "amount": Value(Decimal(5))})
    epoch(made)
    expected = amounts(made)
    made.refuses = False
    made.open()
    replay(made)
    assert amounts(made) == expected
    assert expected.get(1) == (Decimal(5) if later == "update" else None)
    (letter,) = made.letters("superseded")
    assert letter["settled_version"] == made.source.position


def test_C08_a_change_with_unchanged_toast_waits_behind_the_dead_letter_with_the_values(
    made: MemoryPipeline,
) -> None:
    made.source.update(key(1), {"amount": BEYOND, "note": Value("long")})
    epoch(made)
    made.source.update(key(1), {"amount": Value(Decimal(5))}, ["note"])
    epoch(made)
    assert amounts(made)[1] == Decimal("1.5")
    assert [letter["code"] for letter in made.letters()] == ["PEN-1411", "PEN-1414"]
    made.refuses = False
    made.open()
    replay(made)
    assert [(each["note"], each["amount"]) for each in made.sink.list.rows if each["id"] == 1] == [
        ("long", Decimal(5))
    ]
    assert made.letters() == []


def test_C08_a_row_whose_insert_was_rejected_is_not_taken_for_the_former_one_of_its_key(
    made: MemoryPipeline,
) -> None:
    made.source.update(key(1), {"id": Value(7)}, ["note"])
    made.source.insert(row(1, BEYOND, "second"))
    made.source.update(key(1), {"amount": LONG, "note": Value("third")})
    made.source.update(key(7), {"amount": Value(Decimal(8))}, ["note"])
    epoch(made)
    assert {each["id"]: each["note"] for each in made.sink.list.rows} == {7: "n", 1: "third", 2: "n", 3: "n"}


def test_C08_a_replay_applies_the_rows_that_now_fit_and_keeps_the_rest(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    replay(made)
    assert made.replayed == [made.name]
    assert [letter["status"] for letter in made.letters()] == ["open"], "it is refused as it was before"
    assert 4 not in amounts(made)
    made.refuses = False
    made.open()
    replay(made)
    assert amounts(made)[4] == "7e50"
    replay(made)
    assert len(made.sink.list.rows) == 4, "and never again"
    assert [letter["key"] for letter in made.letters("replayed")] == ['{"id":4}']


def test_C08_a_replay_precedes_the_changes_of_its_epoch(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    made.refuses = False
    made.open()
    made.box.order_replay(made.name)
    made.source.update(key(4), {"note": Value("late")}, ["amount"])
    epoch(made)
    assert [(each["note"], dict(each["_exact"])) for each in made.sink.list.rows if each["id"] == 4] == [
        ("late", {"amount": "7e50"})
    ]


def test_C08_rows_rejected_by_a_transform_are_dead_letters_until_the_rule_is_fixed(
    made: MemoryPipeline,
) -> None:
    made.sink.transform = Transform(cast={"note": "int"}, rename={"id": "number"})
    made.source.insert(row(4, note="44"))
    made.source.insert(row(5, note="five"))
    made.source.update(key(1), {"note": Value("one")})
    made.source.update(key(2), {"note": Value("2")})
    epoch(made)
    assert sorted(amounts(made)) == [1, 2, 3, 4]
    assert [each["note"] for each in made.sink.list.rows if each["id"] in (1, 2)] == ["n", "2"]
    assert [(letter["code"], letter["key"]) for letter in made.letters()] == [
        ("PEN-1415", '{"id":5}'),
        ("PEN-1415", '{"id":1}'),
    ]
    assert "'note'" in made.letters()[0]["reason"]
    made.source.update(key(1), {"note": Value("1")})
    epoch(made)
    assert [letter["key"] for letter in made.letters()] == ['{"id":5}'], (
        "the key has the source's name, not the target's"
    )
    made.sink.transform = None
    replay(made)
    assert sorted(amounts(made)) == [1, 2, 3, 4, 5]
    made.policy = RefusedPolicy.STOP
    made.sink.transform = Transform(cast={"note": "int"})
    made.source.insert(row(6, note="six"))
    epoch(made)
    assert "PEN-1415" in (made.applier.tables.statuses[made.name].reason or "")


def test_C08_transformed_dead_letters_are_still_applied_with_the_epoch(
    made: MemoryPipeline, tmp_path: Path
) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    letters = made.box.store.slices(made.name, Position.of(9_000))
    (task,) = plan_stages(letters, Transform(rename={"note": "text"}).fit(PLAIN), tmp_path, 1)
    (staged,) = stage(task)
    assert (staged.file.min_position, staged.file.max_position) == (Position.of(9_000), Position.of(9_000)), (
        "no sink takes it for old"
    )
    assert pq.read_table(staged.path)["_commit_version"].to_pylist() == [made.source.position]


def test_a_replay_without_dead_letters_is_done_at_once(made: MemoryPipeline) -> None:
    made.box.order_replay(made.name)
    assert not made.applier.is_replaying
    assert made.replayed == [made.name]


def test_C08_by_default_a_rejected_value_stops_its_table_and_so_does_a_change_behind_a_dead_letter(
    made: MemoryPipeline,
) -> None:
    made.source.update(key(1), {"amount": BEYOND, "note": Value("long")})
    epoch(made)
    made.policy = RefusedPolicy.STOP
    made.source.update(key(1), {"amount": LONG}, ["note"])
    epoch(made)
    status = made.applier.tables.statuses[made.name]
    assert (status.state, (status.reason or "")[:8]) == (TableState.FAILED, "PEN-1414")
    made.open()
    made.source.insert(row(5, BEYOND))
    epoch(made)
    assert "PEN-1411" in (made.applier.tables.statuses[made.name].reason or "")


def test_a_dead_letter_of_another_schema_stays(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    target = made.sink.load_target(made.name)
    made.box.order_replay(made.name)
    nothing = TableChanges(made.name, (), ChangeCounts())
    assert made.box.include_due(target, nothing, Position.of(1000), lambda _: False).slices == ()
    assert len(made.box.include_due(target, nothing, Position.of(1000), lambda _: True).slices) == 1


def test_dead_letters_of_a_resynced_table_do_not_count(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    shadow = replace(made.sink.load_target(made.name), applied=Position.of(made.source.position))
    made.source.insert(row(5, BEYOND))
    position = made.source.commit(50)
    made.spool(1, 2)
    found = made.applier._reader.read(shadow.applied or Position.ZERO, Position.of(position)).tables[
        made.name
    ]
    changes = made.box.screen_resync(
        made.sink, shadow, TableChanges(made.name, found.slices, found.counts), Position.of(position)
    )
    assert [slice.excluded for slice in changes.slices] == [frozenset({(position, 0)})]
    assert [letter["key"] for letter in made.letters()] == ['{"id":4}'], "not before the copy is in place"
    made.open()
    assert [letter["key"] for letter in made.letters()] == ['{"id":4}'], "which it never was"
    made.box.screen_resync(
        made.sink, shadow, TableChanges(made.name, found.slices, found.counts), Position.of(position)
    )
    made.sink.applied[made.name] = Position.of(position)
    made.open()
    assert [letter["key"] for letter in made.letters()] == ['{"id":5}']
    made.box.supersede_all(made.name)
    assert made.letters() == []


def test_dead_letters_of_a_shadow_outlive_epochs_of_the_table_it_will_replace(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    refused = made.box.store.open_names(made.name)
    stem = made.box.store.new_stem(made.name, Position.of(1))
    (letters,), (changes,) = (
        list(made.box.store.directory.glob(pattern)) for pattern in ("*.parquet", "_changes/*.parquet")
    )
    shutil.copy(letters, made.box.store.pending / f"{stem}{LETTERS_SUFFIX}")
    shutil.copy(changes, made.box.store.pending / f"{stem}{CHANGES_SUFFIX}")
    made.box.hold_for_resync(made.name, (stem,))
    made.source.delete(key(4))
    epoch(made)
    assert made.box.store.open_names(made.name) == set()
    shadow, end = made.sink.load_target(made.name), Position.of(made.source.position + 10)
    made.box.screen_resync(made.sink, shadow, TableChanges(made.name, (), ChangeCounts()), end)
    made.box.applied(made.name)
    assert made.box.store.open_names(made.name) == refused


def test_unreadable_changes_of_dead_letters_are_named(made: MemoryPipeline) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    (path,) = made.box.store.directory.glob("_changes/*.parquet")
    path.write_bytes(b"no parquet")
    with pytest.raises(SpoolCorruptError, match=path.name):
        made.box.store.slices(made.name, Position.of(1))


@pytest.mark.parametrize("fault", ["before", "after"])
def test_C08_dead_letters_of_an_epoch_in_steps_exist_whichever_step_it_dies_in(
    made: MemoryPipeline, fault: str
) -> None:
    """Each step is a separate commit, and changes before it are not read again."""
    made.sink.step_rows = 1
    made.source.update(key(3), {"amount": BEYOND})
    epoch(made)
    for number in (10, 11, 12):
        made.source.insert(row(number, BEYOND))
        made.source.insert(row(number + 10))
        made.source.update(key(3), {"amount": Value(Decimal(number))})
        made.source.commit(50)
        made.spool(len(made.source.log) - 1, len(made.source.log))
    made.sink.faults = iter(["", fault, "", fault])
    made.apply(made.source.position)
    assert set(amounts(made)) == {1, 2, 3, 20, 21, 22}
    assert [json.loads(letter["key"])["id"] for letter in made.letters()] == [10, 11, 12]
    made.refuses = False
    made.open()
    replay(made)
    assert set(amounts(made)) == {1, 2, 3, 10, 11, 12, 20, 21, 22}
    assert amounts(made)[3] == Decimal(12)


def test_C08_a_replay_requested_during_an_epoch_applies_to_the_next(
    made: MemoryPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.source.insert(row(10, BEYOND))
    epoch(made)
    made.refuses = False
    made.open()
    apply = made.sink.apply

    def ordered(*given: Any) -> None:
        made.box.order_replay(made.name)
        apply(*given)

    monkeypatch.setattr(made.sink, "apply", ordered)
    made.source.insert(row(11))
    epoch(made)
    assert len(made.letters()) == 1
    made.apply(made.idle())
    assert made.letters() == []
    assert set(amounts(made)) == {1, 2, 3, 10, 11}


def test_open_dead_letter_files_are_compacted_and_still_replayed(made: MemoryPipeline) -> None:
    made.many = 4
    made.open()
    for number in range(10, 21):
        made.source.insert(row(number, BEYOND))
        epoch(made)
        assert len(list(made.box.store.directory.glob("_changes/*.parquet"))) < 5
    assert len(made.letters()) == 11
    assert len(list(made.box.store.directory.glob("*.parquet"))) < 5
    made.open()
    made.source.delete(key(15))
    epoch(made)
    made.refuses = False
    made.open()
    replay(made)
    assert set(amounts(made)) == {1, 2, 3, *range(10, 21)} - {15}
    assert len(made.letters("replayed")) == 10
    assert len(made.letters("superseded")) == 1


def test_C08_dead_letter_files_are_compacted_or_unchanged_whenever_it_is_killed(
    made: MemoryPipeline, tmp_path: Path
) -> None:
    made.many = 100
    made.open()
    for number in range(10, 13):
        made.source.insert(row(number, BEYOND))
        epoch(made)
    names = made.box.store.open_names(made.name)
    lake = made.box.store.directory.parents[1]
    found = set()
    for after in range(1, 16):
        copy = tmp_path / str(after)
        shutil.copytree(lake, copy)
        with dying_writes(after), suppress(Died):
            DeadLetterStore(copy, "p", 2).compact(made.name)
        again = DeadLetterStore(copy, "p", 2)
        again.sweep()
        kept = [
            name
            for slice in again.slices(made.name, Position.of(1))
            for name in again.open_in(made.name, slice.path)
        ]
        assert sorted(kept) == sorted(names), "each once"
        assert again.load().num_rows == 3
        assert len(list(again.directory.glob("*.parquet"))) == len(
            list(again.directory.glob("_changes/*.parquet"))
        )
        assert not list(again.pending.iterdir())
        found.add(len(list(again.directory.glob("*.parquet"))))
    assert found == {1, 3}


def test_settled_dead_letters_are_compacted_and_removed_later(made: MemoryPipeline) -> None:
    made.many = 4
    made.open()
    folder = made.box.store.compactor
    for number in range(6):
        made.source.update(key(1), {"amount": BEYOND, "note": Value(str(number))})
        epoch(made)
    made.source.update(key(2), {"amount": BEYOND})
    epoch(made)
    began = datetime.now(UTC)
    before = made.box.store.load()
    made.box.store.forget(datetime(1970, 1, 1, tzinfo=UTC))
    assert made.box.store.load() == before
    assert len(list(folder.directory.glob("settled-*.parquet"))) == 1
    assert len(list(folder.directory.glob("*.parquet"))) <= 4
    made.open()
    assert len(made.letters()) == 2
    made.source.delete(key(2))
    epoch(made)
    made.box.store.forget(began)
    (left,) = made.letters("superseded")
    assert json.loads(left["key"]) == {"id": 2}, "the others had been settled before"
    assert len(made.letters()) == 1
    made.box.store.forget(datetime.now(UTC))
    assert made.letters("superseded") == []
    assert len(made.letters()) == 1, "one that is open is never forgotten"


def test_the_command_line_shows_dead_letters_and_requests_replays(
    made: MemoryPipeline, tmp_path: Path
) -> None:
    made.source.insert(row(4, BEYOND))
    epoch(made)
    path = tmp_path / "pipeline.yaml"
    sink = f"{{delta: {{path: '{made.root / 'lake'}'}}}}"
    path.write_text(
        f"pipeline: p\nsource: {{dsn: dbname=x}}\ntables: [public.plain]\nsink: {sink}\nrefused: "
        "dead_letters\n",
        encoding="utf-8",
    )
    runner = CliRunner()
    assert inspect_status(load_config(path)).as_document()["dead_letters"] == {"public.plain": 1}
    shown = json.loads(
        runner.invoke(app, ["dead-letters", "list", str(path), "--json"], catch_exceptions=False).stdout
    )
    assert [(each["table"], each["status"], each["key"]) for each in shown] == [
        ("public.plain", "open", '{"id":4}')
    ]
    assert (
        "PEN-1411" in runner.invoke(app, ["dead-letters", "list", str(path)], catch_exceptions=False).stdout
    )
    assert (
        json.loads(
            runner.invoke(app, ["dead-letters", "list", str(path), "--json", "--table", "public.b"]).stdout
        )
        == []
    )
    others = ["--table", "public.b", "--table", "public.c"]
    error = runner.invoke(app, ["dead-letters", "replay", str(path), *others]).exception
    assert isinstance(error, NoTablesError)
    assert error.message == "there are no open dead letters of public.b, public.c"
    assert (
        "1 dead letter of"
        in runner.invoke(app, ["dead-letters", "replay", str(path)], catch_exceptions=False).stdout
    )
    assert load_overrides(load_config(path).state).replay == {made.name}


def test_the_last_rule_about_rejected_rows_counts(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    rules = "[{match: 'public.*', refused: dead_letters}, {table: public.b, refused: stop}, other.c]"
    path.write_text(
        f"pipeline: p\nsource: {{dsn: dbname=x}}\ntables: {rules}\nsink: {{delta: {{path: lake}}}}\n",
        encoding="utf-8",
    )
    config = load_config(path)
    names = [
        replace(PLAIN.name, schema=schema, name=name)
        for schema, name in (("public", "a"), ("public", "b"), ("other", "c"))
    ]
    assert [config.refused_policy(name).value for name in names] == ["dead_letters", "stop", "stop"]
