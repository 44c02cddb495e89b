from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from penstock.capture.settings import CaptureSettings, Confirm
from penstock.config.model import PipelineConfig, load_config
from penstock.config.secrets import FileReference, Model
from penstock.config.tables import TableRule
from penstock.errors import ConfigError, SecretError
from penstock.pipeline.checks.check import check_pipeline
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.sinks.base import MaintenanceSettings
from penstock.sinks.modes import Mode

MINIMAL = """
pipeline: shop
source: {dsn: "postgresql://cdc@db.example:5433/shop"}
tables: [public.orders]
sink: {delta: {path: lake}}
"""


def _load(tmp_path: Path, text: str) -> PipelineConfig:
    path = tmp_path / "pipeline.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = _load(tmp_path, MINIMAL)
    assert config.sink.root == tmp_path / "lake"
    assert config.spool == tmp_path / "state" / "spool"
    assert config.slot == config.publication == "penstock_shop"


def test_pipelines_that_share_a_slot_name_the_same_spool(tmp_path: Path) -> None:
    shared = MINIMAL.replace(
        'shop"}', 'shop", slot: all, publication: all, spool: ../spool, process: separate}'
    )
    config = _load(tmp_path, shared)
    assert config.spool == tmp_path / "../spool"
    settings = config.capture_settings(tables=[TableName("public", "orders")])
    assert (settings.slot, settings.spool, settings.is_separate) == ("all", config.spool, True)
    assert CaptureSettings.from_options(settings.to_options()) == settings
    assert not _load(tmp_path, MINIMAL).capture_settings().is_separate
    own = _load(tmp_path, MINIMAL.replace('shop"}', 'shop", process: separate}'))
    assert (config.owns_publication, own.owns_publication, _load(tmp_path, MINIMAL).owns_publication) == (
        False,
        False,
        True,
    )


def test_rules_of_a_table_are_matched_once_and_again_for_other_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MINIMAL.replace("[public.orders]", "[public.*, {table: public.orders, mode: append}]")
    config, orders, asked = _load(tmp_path, text), TableName("public", "orders"), list[TableName]()
    selects = TableRule.selects

    def counted(rule: TableRule, name: TableName) -> bool:
        asked.append(name)
        return selects(rule, name)

    monkeypatch.setattr(TableRule, "selects", counted)
    assert [config.mode_of(orders), config.schema_rule(orders).auto_resync] == [Mode.APPEND, False]
    assert asked == [orders, orders], "once for each of the two rules"
    plain = config.model_copy(update={"tables": config.tables[:1]})
    assert plain.mode_of(orders) is Mode.MIRROR
    assert config.mode_of(orders) is Mode.APPEND
    assert config == _load(tmp_path, text), "a lookup changes nothing that is compared"


def test_how_and_who_captures_are_two_things(tmp_path: Path) -> None:
    assert _load(tmp_path, MINIMAL).polling_rules is None
    polled = _load(
        tmp_path,
        MINIMAL.replace(
            'shop"}', 'shop", capture: polling, polling: {interval: 5 seconds, cursors: {public.a: at}}}'
        ),
    )
    rules = polled.polling_rules
    assert rules is not None
    assert (rules.interval_seconds, rules.deletes, rules.resume) == (
        5.0,
        True,
        tmp_path / "state" / "polling",
    )
    assert [rules.cursor_of(TableName("public", name)) for name in "ab"] == ["at", "xmin"]
    assert polled.capture_settings().polling == rules
    with pytest.raises(ConfigError, match="write process: separate"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", capture: separate}'))
    with pytest.raises(ConfigError, match="polling: has no effect because capture: is not polling"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", polling: {}}'))
    with pytest.raises(ConfigError, match="always runs inside penstock run"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", capture: polling, process: separate}'))
    triggered = _load(
        tmp_path, MINIMAL.replace('shop"}', 'shop", capture: trigger, slot: noted}')
    ).capture_settings()
    assert (triggered.by_triggers, triggered.slot, triggered.polling) == (True, "noted", None)
    with pytest.raises(ConfigError, match="publication has no effect with capture: trigger"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", capture: trigger, publication: p}'))
    with pytest.raises(ConfigError, match="max_retained_wal has no effect with capture: trigger"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", capture: trigger}') + "max_retained_wal: 1000\n")
    with pytest.raises(ConfigError, match="no pg_ prefix"):
        _load(tmp_path, MINIMAL.replace('shop"}', 'shop", capture: trigger, slot: pg_noted}'))


@pytest.mark.parametrize(
    ("capture", "published_by"), [("wal", "penstock_shop"), ("polling", None), ("trigger", None)]
)
def test_a_publication_decides_about_rows_and_columns_of_the_log_alone(
    tmp_path: Path, capture: str, published_by: str | None
) -> None:
    """A publication may remain from when the pipeline used logical replication."""
    config = _load(tmp_path, MINIMAL.replace('shop"}', f'shop", capture: {capture}}}'))
    assert config.published_by == published_by
    assert config.origin == (published_by or capture)


def test_an_absolute_path_stays_as_it_is(tmp_path: Path) -> None:
    assert _load(tmp_path, MINIMAL + f"state: {tmp_path}/elsewhere\n").state == tmp_path / "elsewhere"


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace("pipeline: shop", "pipeline: Shop!").replace(
            "sink: {delta: {path: lake}}", "sync: {}"
        )
        + "trigger: soon\n"
    )
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    assert all(key in str(caught.value) for key in ("pipeline:", "sink:", "sync:", "trigger:"))
    assert caught.value.hint


@pytest.mark.parametrize("text", ["[", "pipeline: x\n\t- y", ""])
def test_invalid_configuration_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        _load(tmp_path, text)


@pytest.mark.parametrize(
    ("addition", "key"),
    [
        pytest.param(
            "heartbeat_query: SELECT 1\n",
            "heartbeat_query",
            id="H05: an idle slot advances by itself, without a query of the pipeline",
        ),
        pytest.param(
            "columns: {hash: [email]}\n",
            "columns",
            id="P10: columns are hashed and masked by the rule of a table, see K13",
        ),
    ],
)
def test_H05_P10_misplaced_settings_are_refused_and_not_ignored(
    tmp_path: Path, addition: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        _load(tmp_path, MINIMAL + addition)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("rules", "name", "selected"),
    [
        (["public.*"], TableName("public", "orders"), True),
        (["public.*"], TableName("Public", "orders"), False),
        (["public.orders"], TableName("public", "orders_old"), False),
        (["public.orders"], TableName("public", "orders"), True),
        ([{"match": "*.*", "exclude": ["public.tmp_*"]}], TableName("public", "tmp_1"), False),
        ([{"match": "*.*", "exclude": ["public.tmp_*"]}], TableName("public", "orders"), True),
        (['public."odd.name"'], TableName("public", "odd.name"), True),
        (["public.a_c"], TableName("public", "abc"), False),
        (["public.a_*"], TableName("public", "ab1"), False),
        (["public.per%*"], TableName("public", "percent"), False),
        (["public.per%*"], TableName("public", "per%cent"), True),
        (["public.Ord*"], TableName("public", "orders"), False),
        (["public.ord*"], TableName("public2", "orders"), False),
        (["pub?ic.*"], TableName("public", "two words"), True),
        (['public."two words"'], TableName("public", "two words"), True),
        (['public."two words"'], TableName("public", "two  words"), False),
        (["public.* *"], TableName("public", "orders"), False),
        (["a.*"], TableName("a.b", "c"), False),
        (["a.*"], TableName("a", "b.c"), True),
        (["*"], TableName("any", "table"), True),
        (["back\\\\slash.*"], TableName("back\\slash", "t"), False),
        (["*.*"], TableName('odd "schema"', "new\nline"), True),
    ],
)
def test_P07_rules_select_tables(
    tmp_path: Path, rules: list[object], name: TableName, selected: bool
) -> None:
    document = {**yaml.safe_load(MINIMAL), "tables": rules}
    assert _load(tmp_path, yaml.safe_dump(document)).selects(name) is selected


def test_the_last_rule_that_says_a_mode_says_it_for_its_tables(tmp_path: Path) -> None:
    document = {**yaml.safe_load(MINIMAL), "sink": {"postgres": {"dsn": "dbname=x"}}}
    rules = [
        {"match": "public.*", "mode": "soft_delete"},
        {"table": "public.orders", "mode": "history"},
        "public.*",
        "other.t",
    ]
    config = _load(tmp_path, yaml.safe_dump({**document, "tables": rules, "mode": "append"}))
    assert config.mode_of(TableName("public", "orders")) is Mode.HISTORY
    assert config.mode_of(TableName("public", "items")) is Mode.SOFT_DELETE
    assert config.mode_of(TableName("other", "t")) is Mode.APPEND
    assert _load(tmp_path, MINIMAL).mode_of(TableName("public", "orders")) is Mode.MIRROR
    with pytest.raises(ConfigError, match="mode"):
        _load(tmp_path, MINIMAL + "mode: mirrored\n")


def test_a_mode_that_the_sink_does_not_have_is_refused(tmp_path: Path) -> None:
    given = MINIMAL.replace("delta: {path: lake}", "parquet: {path: logs}")
    assert _load(tmp_path, given).mode_of(TableName("public", "orders")) is Mode.APPEND
    assert _load(tmp_path, given + "mode: append\n").mode is Mode.APPEND
    with pytest.raises(ConfigError, match="supports mode append, not history"):
        _load(tmp_path, given.replace("[public.orders]", "[{table: public.orders, mode: history}]"))
    with pytest.raises(ConfigError, match="not soft_delete"):
        _load(tmp_path, given + "mode: soft_delete\n")


def test_the_guides_example_of_modes_is_a_configuration(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "modes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    given = MINIMAL.replace("tables: [public.orders]\n", "").replace(
        "{delta: {path: lake}}", "{postgres: {dsn: dbname=x}}"
    )
    config = _load(tmp_path, given + block)
    assert [config.mode_of(TableName("public", name)) for name in ("orders", "events", "items")] == [
        "history",
        "append",
        "mirror",
    ]


@pytest.mark.parametrize("rule", [{"table": "a.b", "match": "c.*"}, {}, {"table": "nodot"}])
def test_a_rule_that_says_nothing_or_two_things_is_refused(tmp_path: Path, rule: object) -> None:
    with pytest.raises(ConfigError):
        _load(tmp_path, yaml.safe_dump({**yaml.safe_load(MINIMAL), "tables": [rule]}))


@pytest.mark.parametrize(
    ("text", "seconds"), [("1 second", 1.0), ("500 ms", 0.5), ("2 minutes", 120.0), ("1.5s", 1.5)]
)
def test_a_trigger_is_a_duration(tmp_path: Path, text: str, seconds: float) -> None:
    assert _load(tmp_path, MINIMAL + f"trigger: {text}\n").trigger_seconds == seconds


def test_a_password_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = MINIMAL.replace('shop"}', 'shop", password: {env: SHOP_PASSWORD}}')
    with pytest.raises(SecretError, match="SHOP_PASSWORD"):
        _load(tmp_path, text).source.address()
    monkeypatch.setenv("SHOP_PASSWORD", "hunter2")
    address = _load(tmp_path, text).source.address()
    assert address.password is not None
    assert address.password.reveal() == "hunter2"
    assert "hunter2" not in repr(address) + address.describe() + address.dsn


def test_a_password_is_read_from_a_file_next_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    address = _load(tmp_path, MINIMAL.replace('shop"}', 'shop", password: {file: secret}}')).source.address()
    assert address.password is not None
    assert address.password.reveal() == "hunter2"


def test_a_password_inside_the_dsn_is_taken_out_of_sight(tmp_path: Path) -> None:
    address = _load(tmp_path, MINIMAL.replace("cdc@", "cdc:hunter2@")).source.address()
    assert "hunter2" not in repr(address) + address.dsn + address.describe()
    assert "password=hunter2" in address.conninfo("test")


def test_tls_settings_reach_the_connection(tmp_path: Path) -> None:
    config = _load(tmp_path, MINIMAL.replace('shop"}', 'shop", tls: {mode: verify-full, root_cert: ca.pem}}'))
    conninfo = config.source.address().conninfo("test")
    assert "sslmode=verify-full" in conninfo
    assert f"sslrootcert={tmp_path}/ca.pem" in conninfo


def test_the_file_of_a_hash_key_is_relative_to_the_configuration(tmp_path: Path) -> None:
    config = _load(tmp_path, MINIMAL + "hash_key: {file: keys/hash}\n")
    assert isinstance(config.hash_key, FileReference)
    assert config.hash_key.file == tmp_path / "keys" / "hash"


def test_an_invalid_dsn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dsn"):
        _load(
            tmp_path, MINIMAL.replace("postgresql://cdc@db.example:5433/shop", "not a dsn")
        ).source.address()


@pytest.mark.parametrize("given", ['"a, b"', "[a, b]", "[a]"])
def test_P06_several_publications_are_refused_with_the_fix(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, MINIMAL.replace('shop"}', f'shop", publication: {given}}}'))
    assert "source.publication: " in caught.value.message
    assert "a capture uses one publication: name one that has all tables" in caught.value.message


def test_P06_several_publications_of_a_source_are_refused_with_the_fix() -> None:
    options = {
        "dsn": "postgresql://cdc@db.example/shop",
        "slot": "shop",
        "spool": "/spool",
        "publication": "a,b",
    }
    with pytest.raises(ConfigError, match="the option 'publication' lists several: a,b") as caught:
        CaptureSettings.from_options(options)
    assert (caught.value.hint or "").startswith("a capture uses one publication: ")


@pytest.mark.parametrize("name", ["Shop", "shop-1", "", "x" * 64])
def test_L09_an_invalid_slot_name_is_explained(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"source\.slot: .*a slot name consists of lower-case letters, digits and underscores",
    ):
        _load(tmp_path, MINIMAL.replace('shop"}', f'shop", slot: "{name}"}}'))


def test_how_the_slot_is_kept_and_confirmed_reaches_the_capture(tmp_path: Path) -> None:
    text = (
        MINIMAL.replace('shop"}', 'shop", failover: true}') + "confirm: spooled\nmax_retained_wal: 1000000\n"
    )
    settings = _load(tmp_path, text).capture_settings()
    assert (settings.failover, settings.confirm, settings.max_retained_bytes) == (
        True,
        Confirm.SPOOLED,
        1_000_000,
    )


@pytest.mark.parametrize(("text", "policy"), [("null", "null"), ("'null'", "null"), ("error", "error")])
def test_policy_for_values_beyond_their_type_reaches_the_capture(
    tmp_path: Path, text: str, policy: str
) -> None:
    """YAML parses a bare null as None."""
    config = _load(tmp_path, MINIMAL + f'types: {{on_unrepresentable: {text}, numeric: "decimal(20,4)"}}\n')
    assert config.capture_settings().types == TypePolicy("decimal(20,4)", policy)


@pytest.mark.parametrize(
    "types", ["{numeric: float}", '{numeric: "decimal(40,2)"}', "{on_unrepresentable: maybe}"]
)
def test_a_policy_about_types_that_makes_no_sense_is_refused(tmp_path: Path, types: str) -> None:
    with pytest.raises(ConfigError, match="types"):
        _load(tmp_path, MINIMAL + f"types: {types}\n")


@pytest.mark.parametrize(
    "text",
    [
        "source:\n  dsn: postgresql://u:s3cretpw@h/db: x\n",
        'source:\n  dsn: "postgresql://u:s3cretpw@h/db\n  password: x\n',
        "source:\n  dsn: {postgresql://u:s3cretpw@h/db\n",
        "source:\n  password: *s3cretpw\n",
        "source:\n  password: !s3cretpw\n",
        "source:\n  password: !s3cretpw!x y\n",
        'source:\n  password: {env: "\x00s3cretpw"}\n',
        "source: {postgresql://u:s3cretpw@h/db: }\n",
        "source: {password: {s3cretpw: x}}\n",
        "source: {password: s3cretpw}\n",
        "source: {dsn: {s3cretpw@: s3cretpw}}\n",
    ],
)
def test_C03_error_of_an_unreadable_file_shows_none_of_its_content(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, "pipeline: t\n" + text)
    assert "s3cretpw" not in str(caught.value)


def test_a_fault_in_the_file_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mapping values are not allowed here, line 3, column 36"):
        _load(tmp_path, "pipeline: t\nsource:\n  dsn: postgresql://u:s3cretpw@h/db: x\n")


def test_invalid_utf8_or_dates_are_one_of_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_bytes(MINIMAL.encode() + b"state: caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(path)
    with pytest.raises(ConfigError):
        _load(tmp_path, MINIMAL + "state: 2020-99-99\n")
    (tmp_path / "password").write_bytes(b"s3cret\xff")
    config = _load(tmp_path, MINIMAL.replace('5433/shop"', '5433/shop", password: {file: password}'))
    with pytest.raises(SecretError, match="is not UTF-8") as caught:
        config.source.address()
    assert "s3cret" not in str(caught.value)


def test_a_sink_is_one_of_the_kinds_and_the_error_names_them(tmp_path: Path) -> None:
    for sink in ("{}", "{delta: {path: lake}, postgres: {dsn: 'host=b'}}"):
        with pytest.raises(ConfigError, match=r"give one of delta, .*postgres"):
            _load(tmp_path, MINIMAL.replace("{delta: {path: lake}}", sink))


def test_a_postgres_sink_reads_values_as_text_and_keeps_its_records_beside_the_file(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        MINIMAL.replace(
            "{delta: {path: lake}}", "{postgres: {dsn: 'host=b dbname=copy', password: {file: secret}}}"
        ),
    )
    assert config.sink.root == tmp_path / "target"
    assert config.type_policy.is_text
    assert not _load(tmp_path, MINIMAL).type_policy.is_text
    assert config.capture_settings().types == config.type_policy
    (tmp_path / "secret").write_text("hunter2", encoding="utf-8")
    assert config.sink.postgres is not None
    assert config.sink.postgres.address().password is not None


def test_settings_without_a_meaning_for_a_postgres_sink_are_refused(tmp_path: Path) -> None:
    text = MINIMAL.replace("{delta: {path: lake}}", "{postgres: {dsn: 'host=b'}}")
    with pytest.raises(ConfigError, match=r"types\.numeric has no effect with sink\.postgres"):
        _load(tmp_path, text + "types: {numeric: string}\n")
    with pytest.raises(ConfigError, match="the schema penstock is reserved"):
        _load(tmp_path, text.replace("'host=b'", "'host=b', schemas: {public: penstock}"))


def test_an_iceberg_sink_has_a_catalog_and_keeps_its_state_in_the_warehouse(tmp_path: Path) -> None:
    config = _load(
        tmp_path, MINIMAL.replace("delta: {path: lake}", "iceberg: {warehouse: lake, namespace: prod.mirror}")
    )
    assert config.sink.iceberg is not None
    assert config.sink.root == config.sink.iceberg.warehouse == tmp_path / "lake"
    assert (config.sink.iceberg.catalog, config.sink.iceberg.namespace) == ("lake", ("prod", "mirror"))


def test_maintenance_is_of_all_tables_and_delta_tables_keep_an_hour_at_least(tmp_path: Path) -> None:
    config = _load(tmp_path, MINIMAL)
    assert config.maintenance.delta == MaintenanceSettings()
    assert (config.maintenance.iceberg_keep_seconds, config.maintenance.limit_seconds) == (3600, 600)
    chosen = "maintenance: {compact_after: 0, checkpoint_after: 10, keep: 2 days, time_limit: 1 minute}\n"
    config = _load(tmp_path, MINIMAL + chosen)
    assert config.maintenance.delta == MaintenanceSettings(
        compact_after=0, checkpoint_after=10, keep_seconds=2 * 86400
    )
    assert config.maintenance.iceberg_keep_seconds == 2 * 86400
    assert (config.maintenance.delta.versions, config.maintenance.iceberg_versions) == (20_000, 1_000)
    config = _load(tmp_path, MINIMAL + "maintenance: {versions: 300}\n")
    assert (config.maintenance.delta.versions, config.maintenance.iceberg_versions) == (300, 300)
    assert _load(tmp_path, MINIMAL + "maintenance: {vacuum: no}\n").maintenance.delta.keep_seconds is None
    with pytest.raises(ConfigError, match="must be at least 1 hour"):
        _load(tmp_path, MINIMAL + "maintenance: {keep: 59 minutes}\n")
    with pytest.raises(ConfigError, match="duration"):
        _load(tmp_path, MINIMAL + "maintenance: {keep: long}\n")
    iceberg = MINIMAL.replace("{delta: {path: lake}}", "{iceberg: {warehouse: lake}}")
    brief = _load(tmp_path, iceberg + "maintenance: {keep: 1 minute}\n").maintenance
    assert (brief.iceberg_keep_seconds, brief.delta.keep_seconds) == (60, 3600), (
        "the default for Delta tables is the same"
    )


@pytest.mark.parametrize(
    "sink",
    [
        "{}",
        "{delta: {path: lake}, iceberg: {warehouse: lake}}",
        "{iceberg: {}}",
        "{iceberg: {warehouse: lake, catalog: a.b}}",
        "{iceberg: {warehouse: lake, format_version: 1}}",
    ],
)
def test_there_is_one_sink_with_options_that_make_sense(tmp_path: Path, sink: str) -> None:
    with pytest.raises(ConfigError, match="sink"):
        _load(tmp_path, MINIMAL.replace("{delta: {path: lake}}", sink))


def test_S13_schema_changes_are_followed_unless_the_pipeline_or_a_tables_last_rule_says_otherwise(
    tmp_path: Path,
) -> None:
    rules = """tables:
  - {match: public.*, schema_changes: stop}
  - other.*
  - {table: public.log, schema_changes: ignore}
"""
    config = _load(
        tmp_path, MINIMAL.replace("tables: [public.orders]\n", rules) + "schema_changes: additive\n"
    )
    names = [TableName("public", "log"), TableName("public", "orders"), TableName("other", "t")]
    assert [config.schema_rule(name).policy for name in names] == ["ignore", "stop", "additive"]
    assert _load(tmp_path, MINIMAL).schema_rule(names[0]).auto_resync
    assert not _load(tmp_path, MINIMAL.replace("delta:", "parquet:")).schema_rule(names[0]).auto_resync


# --- locations ----------------------------------------------------------------------------------------------

LOCATIONS = {
    "state": "state: LOCATION",
    "source.spool": 'source: {dsn: "postgresql://cdc@db.example/shop", spool: LOCATION}',
    "source.password": 'source: {dsn: "postgresql://cdc@db.example/shop", password: {file: LOCATION}}',
    "source.tls.root_cert": 'source: {dsn: "postgresql://cdc@db.example/shop", tls: {root_cert: LOCATION}}',
    "hash_key": "hash_key: {file: LOCATION}",
    "sink.delta.path": "sink: {delta: {path: LOCATION}}",
    "sink.parquet.path": "sink: {parquet: {path: LOCATION}}",
    "sink.postgres.state": 'sink: {postgres: {dsn: "postgresql://cdc@other.example/lake", state: LOCATION}}',
    "sink.iceberg.warehouse": "sink: {iceberg: {warehouse: LOCATION}}",
}


def _at(tmp_path: Path, key: str, location: str) -> PipelineConfig:
    document = yaml.safe_load(MINIMAL) | yaml.safe_load(LOCATIONS[key].replace("LOCATION", location))
    return _load(tmp_path, yaml.safe_dump(document))


@pytest.mark.parametrize("key", LOCATIONS)
@pytest.mark.parametrize(
    "url", ["s3://k3y:s3cr3t@bucket/lake", "abfss://c@account.dfs.example/lake", "hdfs:/lake", "GS://bucket"]
)
def test_a_url_of_another_scheme_than_file_is_refused_in_every_location_with_reason_and_fix(
    tmp_path: Path, key: str, url: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _at(tmp_path, key, url)
    scheme = url.partition(":")[0].lower()
    assert caught.value.code == "PEN-1001"
    words = (
        rf"{re.escape(key)}\S*: Value error, {scheme}: URLs are not supported: .*give the path of a directory"
    )
    assert re.search(words, str(caught.value))
    assert "s3cr3t" not in str(caught.value)


def test_every_location_is_tried_above() -> None:
    def paths(model: type[Model], place: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            for kind in (field.annotation, *get_args(field.annotation)):
                if kind is Path:
                    yield f"{place}{name}"
                elif isinstance(kind, type) and issubclass(kind, Model):
                    yield from paths(kind, f"{place}{name}.")

    found = {path.removesuffix(".file") for path in paths(PipelineConfig, "")}
    alike = {"sink.postgres.password", "source.tls.cert", "source.tls.key"}
    assert found == LOCATIONS.keys() | alike


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///mnt/my%20lake", "/mnt/my lake"),
        ("file:/mnt/lake", "/mnt/lake"),
        ("FILE://localhost/mnt/lake", "/mnt/lake"),
        ("a:b/lake", "{}/a:b/lake"),
    ],
)
def test_a_file_url_is_taken_as_its_path(tmp_path: Path, url: str, path: str) -> None:
    assert _at(tmp_path, "sink.delta.path", url).sink.root == Path(path.format(tmp_path))


def test_a_file_url_of_another_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names another host"):
        _at(tmp_path, "state", "file://nas/lake")


def test_the_addresses_of_an_iceberg_catalog_are_left_to_spark(tmp_path: Path) -> None:
    described = {
        "spark.sql.catalog.prod.uri": "jdbc:postgresql://db.example/catalog",
        "spark.sql.catalog.prod.warehouse": "s3://bucket/lake",
    }
    document = yaml.safe_load(MINIMAL) | {
        "sink": {"iceberg": {"catalog": "prod", "warehouse": "/mnt/lake"}},
        "spark": {"conf": described},
    }
    assert _load(tmp_path, yaml.safe_dump(document)).spark.conf == described


def test_check_refuses_an_object_store_before_it_connects(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(
        MINIMAL.replace("path: lake", "path: s3://bucket/lake"), encoding="utf-8"
    )
    report = check_pipeline(tmp_path / "pipeline.yaml")
    assert (
        report.exit_code,
        [(step.name, [each.code for each in step.problems]) for step in report.steps],
    ) == (
        2,
        [("configuration", ["PEN-1001"])],
    )
