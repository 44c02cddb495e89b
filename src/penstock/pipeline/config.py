"""The configuration: one YAML file, every option declared here once.

Relative paths are relative to the file. Secrets are given by reference and resolved when they are needed, not when the file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from penstock.capture.confirming import Confirm
from penstock.capture.polling_rules import PollingRules
from penstock.capture.settings import CaptureLimits, CaptureSettings
from penstock.capture.trigger_settings import NAME_RULE, is_change_table_name
from penstock.errors import ConfigError
from penstock.pipeline.durations import checked_duration, parse_seconds
from penstock.pipeline.existing_policy import ExistingPolicy
from penstock.pipeline.letters.policy import RefusedPolicy
from penstock.pipeline.maintenance_config import MaintenanceConfig
from penstock.pipeline.polling_config import PollingConfig
from penstock.pipeline.references import EnvReference, FileReference, Model
from penstock.pipeline.routes import Route, check_routes
from penstock.pipeline.schema_policy import SchemaPolicy, SchemaRule
from penstock.pipeline.sink_config import SinkConfig
from penstock.pipeline.table_rules import TableRule, build_transform
from penstock.postgres.connection import SourceAddress
from penstock.postgres.ddl_trigger import PREFIX
from penstock.postgres.publication import ONE_PUBLICATION, names_several
from penstock.postgres.slot import is_slot_name
from penstock.postgres.types.policy import TypePolicy
from penstock.schema import TableName
from penstock.sinks.layout import Mode
from penstock.transforms.transform import Transform

_PIPELINE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_KEY = re.compile(r"\w{1,40}")
_YAML_NAME = re.compile(r"(alias|anchor|tag|handle) (['\"]).*\2")


class TlsConfig(Model):
    """How the connection is secured; the same words as libpq's. Without it, what `dsn` says counts."""

    mode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] = "verify-full"
    root_cert: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class SourceConfig(Model):
    """The Postgres database that is captured."""

    dsn: str = Field(description="libpq URI or key=value string; the password goes elsewhere")
    password: EnvReference | FileReference | None = Field(
        None, description="{env: NAME} or {file: PATH}; a file is read anew for every connection"
    )
    slot: str | None = Field(None, description="default: penstock_<pipeline>; with `capture: trigger`, the schema of the change table")
    publication: str | None = Field(None, description="default: penstock_<pipeline>", min_length=1, max_length=63)
    failover: bool = Field(
        False, description="have standbys keep a copy of the slot, so that it survives a promotion; Postgres 17 and later"
    )
    capture: Literal["wal", "polling", "trigger"] = Field(
        "wal",
        description="how changes are learned of: from the server's log, by logical replication; by asking the tables again and again; or "
        "by triggers, which write them into a change table",
    )
    polling: PollingConfig | None = None
    process: Literal["embedded", "separate"] = Field(
        "embedded",
        description="who captures: the run itself, or `penstock capture`, a process of its own behind which several pipelines read",
    )
    spool: Path | None = Field(
        None, description="where captured changes are kept; default: in the state directory. Pipelines that share a slot name the same one"
    )
    event_trigger: bool = Field(
        False,
        description="have an event trigger of the database tell what becomes of columns, so that fewer tables have to be copied anew",
    )
    old_rows: bool = Field(
        False,
        description="whether tables in `append` mode also get rows as they were before an update or a delete; of tables with REPLICA "
        "IDENTITY FULL (on every partition), since no others have them in the log",
    )
    tls: TlsConfig | None = None

    @field_validator("capture", mode="before")
    @classmethod
    def _says_how(cls, value: Any) -> Any:
        if value in ("embedded", "separate"):
            raise ValueError(f"who captures is said by process now: write process: {value}")
        return value

    @model_validator(mode="after")
    def _is_polled(self) -> SourceConfig:
        if self.polling is not None and self.capture != "polling":
            raise ValueError("polling: says how tables are asked, and capture: is not polling")
        if self.capture == "polling" and self.process == "separate":
            raise ValueError("capture: polling is done by the run itself: remove process: separate")
        of_slots = sorted({"slot", "publication", "failover", "event_trigger", "old_rows"} & self.model_fields_set)
        if self.capture == "polling" and of_slots:
            raise ValueError(f"{of_slots[0]} is of no use with capture: polling, which needs neither slot nor publication: remove it")
        of_logs = [each for each in of_slots if each != "slot"]
        if self.capture == "trigger" and of_logs:
            raise ValueError(f"{of_logs[0]} is of no use with capture: trigger, which does not read the log: remove it")
        if self.capture == "trigger" and self.slot is not None and not is_change_table_name(self.slot):
            raise ValueError(f"slot is the name of the change table's schema: {NAME_RULE}")
        return self

    @field_validator("publication", mode="before")
    @classmethod
    def _one_publication(cls, value: Any) -> Any:
        if isinstance(value, list) or (isinstance(value, str) and names_several(value)):
            raise ValueError(ONE_PUBLICATION)
        return value

    @field_validator("slot")
    @classmethod
    def _slot_name(cls, value: str | None) -> str | None:
        if value is not None and not is_slot_name(value):
            raise ValueError("a slot's name has lower-case letters, digits and underscores, 63 at most")
        return value

    def address(self) -> SourceAddress:
        address = SourceAddress.parse(self.dsn, self.password.follow() if self.password else None)
        if self.tls is None:
            return address
        pairs = {"sslmode": self.tls.mode, "sslrootcert": self.tls.root_cert, "sslcert": self.tls.cert, "sslkey": self.tls.key}
        return address.with_parameters({name: str(value) for name, value in pairs.items() if value is not None})


class SparkConfig(Model):
    """The Spark application. The right Maven coordinates for the running Spark are chosen by default."""

    master: str | None = Field(default=None, description="default: what spark-submit was given; without spark-submit, `local[*]`")
    packages: tuple[str, ...] = Field(default=(), description="Maven coordinates; under spark-submit they are given by --packages")
    conf: dict[str, str] = Field(default_factory=dict, description="settings of Spark; they win over those that Penstock makes")


class TypesConfig(Model):
    """How types are read that Spark has no equal for."""

    numeric: str = Field(
        default="decimal(38,18)", description="numeric without a precision, or with more than 38 digits, becomes `decimal(p,s)` or `string`"
    )
    on_unrepresentable: Literal["null", "error"] = Field(
        default="null",
        description="a value that its type cannot hold: `null`, and its text in `_exact`; or an `error` that stops its table",
    )

    @field_validator("on_unrepresentable", mode="before")
    @classmethod
    def _yaml_null(cls, value: Any) -> Any:
        return "null" if value is None else value

    @model_validator(mode="after")
    def _is_policy(self) -> TypesConfig:
        _ = self.policy
        return self

    @property
    def policy(self) -> TypePolicy:
        return TypePolicy(self.numeric, self.on_unrepresentable)


class PipelineConfig(Model):
    """The whole file."""

    pipeline: str = Field(description="its name: lower-case letters, digits and underscores, at most 40, a letter first")
    source: SourceConfig
    tables: Annotated[tuple[TableRule, ...], Field(min_length=1)]
    sink: SinkConfig
    mode: Mode | None = Field(
        None,
        description="what the target's table holds: `mirror` (the default), the source's rows; `soft_delete`, deleted ones too, flagged; "
        "`history`, every version of every row; `append`, every change. Parquet has `append` alone",
    )
    state: Path = Field(Path("state"), description="spool and checkpoint; on a disk that the executors reach")
    trigger: str = Field("1 second", description="how often an epoch is applied, at most")
    max_rows_per_epoch: int = Field(1_000_000, gt=0, description="the most changes of one epoch, in whole segments of the spool")
    max_spool_bytes: int = Field(20 << 30, gt=0, description="at this size receiving pauses until targets catch up")
    confirm: Confirm = Field(
        Confirm.APPLIED, description="what the server may forget: `applied`, what the targets have; `spooled`, what the spool has on disk"
    )
    max_retained_wal: int | None = Field(
        None, gt=0, description="bytes of WAL that the slot may retain before `applied` gives way to `spooled`, until targets catch up"
    )
    snapshot_chunk_bytes: int = Field(
        128 << 20, ge=8192, description="heap bytes that one task reads and writes to one file, at most; a small table is cut finer"
    )
    max_snapshot_hold: str = Field(
        "1 hour", description="how long one exported snapshot is held, at most; a longer copy goes on under a new one"
    )
    schema_changes: SchemaPolicy = Field(
        SchemaPolicy.EVOLVE,
        description="when a table's shape changes: `evolve`, the target follows, and where it cannot the table is copied anew; `additive`, "
        "columns are added and widened, anything else stops the table; `ignore`, the target keeps its columns, new ones are left out and "
        "dropped ones become null; `stop`, any change stops the table",
    )
    hash_key: EnvReference | FileReference | None = Field(
        None, description="the secret under which columns are hashed, {env: NAME} or {file: PATH}"
    )
    existing: ExistingPolicy = Field(
        ExistingPolicy.REFUSE,
        description="when a table that the pipeline did not write stands where one of its own is to go: `refuse`; `adopt`, it becomes the "
        "pipeline's, and its rows are replaced once a copy is complete; `replace`, it is removed with all that it holds",
    )
    refused: RefusedPolicy = Field(
        RefusedPolicy.STOP,
        description="when a row cannot be applied: `stop`, its table stops; `dead_letters`, it is put aside, to be read and replayed",
    )
    maintenance: MaintenanceConfig = MaintenanceConfig()
    types: TypesConfig = TypesConfig()
    spark: SparkConfig = SparkConfig()
    _removed: frozenset[TableName] = PrivateAttr(frozenset())

    @model_validator(mode="after")
    def _has_types(self) -> PipelineConfig:
        if self.sink.postgres is not None and "numeric" in self.types.model_fields_set:
            raise ValueError("types.numeric says nothing to sink.postgres, whose columns are numeric themselves: remove it")
        return self

    @model_validator(mode="after")
    def _has_log(self) -> PipelineConfig:
        if self.max_retained_wal is not None and self.source.capture != "wal":
            raise ValueError(f"max_retained_wal is of no use with capture: {self.source.capture}, which holds no WAL back: remove it")
        return self

    @model_validator(mode="after")
    def _keeps_long(self) -> PipelineConfig:
        if self.sink.delta is not None and self.maintenance.delta_keep_seconds < 3600:
            raise ValueError("maintenance.keep is an hour at least for sink.delta: what is being read or written must stay")
        return self

    @model_validator(mode="after")
    def _has_modes(self) -> PipelineConfig:
        other = [mode for mode in (self.mode, *(rule.mode for rule in self.tables)) if mode not in (None, *self.sink.modes)]
        if other:
            raise ValueError(f"this sink keeps tables as {' or '.join(self.sink.modes)}, not as {other[0]}")
        return self

    @model_validator(mode="after")
    def _has_hash_key(self) -> PipelineConfig:
        if self.hash_key is None and any(rule.columns is not None and rule.columns.hash for rule in self.tables):
            raise ValueError("columns are hashed, and hash_key is not given: add hash_key: {env: NAME}, a long random text")
        return self

    @model_validator(mode="after")
    def _has_routes(self) -> PipelineConfig:
        check_routes(rule.route for rule in self.tables)
        return self

    @field_validator("pipeline")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _PIPELINE.fullmatch(value):
            raise ValueError("a pipeline's name has lower-case letters, digits and underscores, at most 40, and begins with a letter")
        return value

    _durations = field_validator("trigger", "max_snapshot_hold")(checked_duration)

    @property
    def trigger_seconds(self) -> float:
        return parse_seconds(self.trigger)

    @property
    def max_snapshot_hold_seconds(self) -> float:
        return parse_seconds(self.max_snapshot_hold)

    @property
    def slot(self) -> str:
        return self.source.slot or f"penstock_{self.pipeline}"

    @property
    def publication(self) -> str:
        return self.source.publication or f"penstock_{self.pipeline}"

    @property
    def published_by(self) -> str | None:
        """The publication that decides which rows and columns arrive; None where changes do not come from the log."""
        return self.publication if self.source.capture == "wal" else None

    @property
    def origin(self) -> str:
        """By what a spool is filled from the slot, or from what stands for one."""
        return self.published_by or self.source.capture

    @property
    def owns_publication(self) -> bool:
        """Whether tables may be taken out of it: others may read a publication that is named, or a spool that is captured for several."""
        return self.source.publication is None and self.source.process == "embedded"

    @property
    def polling_rules(self) -> PollingRules | None:
        """None where changes come from the log."""
        return (self.source.polling or PollingConfig()).rules(self.state) if self.source.capture == "polling" else None

    @property
    def type_policy(self) -> TypePolicy:
        """Another Postgres reads what the source writes: on the way to it nothing has a type."""
        return replace(self.types.policy, form="text") if self.sink.postgres is not None else self.types.policy

    @property
    def spool(self) -> Path:
        return self.source.spool or self.state / "spool"

    @property
    def checkpoint(self) -> Path:
        return self.state / "checkpoint"

    @property
    def lock(self) -> Path:
        """Held by the JVM of the run."""
        return self.state / "pipeline.lock"

    @property
    def barriers(self) -> Path:
        return self.state / "barriers"

    @property
    def named_tables(self) -> list[TableName]:
        named = [TableName.parse(rule.table) for rule in self.tables if rule.table is not None]
        return [name for name in named if name not in self._removed]

    def selects(self, name: TableName) -> bool:
        """Whether this table of the source is wanted, be it for itself or to go into another."""
        route = self.route_of(name)
        return name not in self._removed and not (route and route.into in self._removed) and any(rule.selects(name) for rule in self.tables)

    def route_of(self, name: TableName) -> Route | None:
        """Where this table of the source goes, if not into one of its own name."""
        if not self.is_routing:
            return None
        return next((rule.route for rule in reversed(self.tables) if rule.into is not None and rule.selects(name)), None)

    @property
    def is_routing(self) -> bool:
        return any(rule.into is not None for rule in self.tables)

    def has(self, name: TableName) -> bool:
        """Whether the pipeline has, or would have, a table of this name: one of the source's, or one into which others go."""
        is_target = any(route is not None and route.into == name for route in (rule.route for rule in self.tables))
        return (is_target and name not in self._removed) or (self.selects(name) and self.route_of(name) is None)

    def rules_of(self, name: TableName) -> list[TableRule]:
        """The rules about a table of the pipeline; what the last of them says counts."""
        routed = [rule for rule in self.tables if rule.route is not None and rule.route.into == name]
        return routed or [rule for rule in self.tables if rule.selects(name)]

    def mode_of(self, name: TableName) -> Mode:
        said = next((rule.mode for rule in reversed(self.rules_of(name)) if rule.mode is not None), self.mode)
        return said or self.sink.modes[0]

    def schema_rule(self, name: TableName) -> SchemaRule:
        said = (rule.schema_changes for rule in reversed(self.rules_of(name)) if rule.schema_changes is not None)
        return SchemaRule(next(said, self.schema_changes), self.mode_of(name) is Mode.MIRROR, self.transform_of(name))

    def transform_of(self, name: TableName) -> Transform | None:
        """What is done to the table's rows on their way; None: nothing."""
        rule = next((rule for rule in reversed(self.rules_of(name)) if rule.transforms), None)
        return None if rule is None else build_transform(rule, self.hash_key, needs_key=self.mode_of(name) is not Mode.APPEND)

    def existing_policy(self, name: TableName) -> ExistingPolicy:
        said = (rule.existing for rule in reversed(self.rules_of(name)) if rule.existing is not None)
        return next(said, self.existing)

    def refused_policy(self, name: TableName) -> RefusedPolicy:
        said = (rule.refused for rule in reversed(self.rules_of(name)) if rule.refused is not None)
        return next(said, self.refused)

    def with_tables(self, added: Iterable[TableName], removed: Iterable[TableName]) -> PipelineConfig:
        """As if the file named some tables more, and others not."""
        rules = [TableRule.model_validate({"table": str(name)}) for name in added if not self.has(name) and not self.selects(name)]
        changed = self.model_copy(update={"tables": (*self.tables, *rules)})
        changed._removed = frozenset(removed)  # noqa: SLF001 of this very class
        return changed

    def capture_settings(self, *, quiet_seconds: float | None = None, tables: Iterable[TableName] = ()) -> CaptureSettings:
        """Without tables: publication and slot are the pipeline's to create, and a slot that is gone must not be made anew in silence."""
        limits = CaptureLimits(spool_bytes=self.max_spool_bytes)
        if quiet_seconds is not None:
            limits = CaptureLimits(spool_bytes=self.max_spool_bytes, quiet_seconds=quiet_seconds)
        return CaptureSettings(
            self.source.address(),
            self.slot,
            self.publication,
            self.spool,
            tuple(tables),
            limits=limits,
            types=self.type_policy,
            failover=self.source.failover,
            confirm=self.confirm,
            max_retained_bytes=self.max_retained_wal,
            message_prefixes=(PREFIX,) if self.source.event_trigger else (),
            is_separate=self.source.process == "separate",
            polling=self.polling_rules,
            by_triggers=self.source.capture == "trigger",
            old_rows=self.source.old_rows,
        )


def load_config(path: Path) -> PipelineConfig:
    """Read and check a configuration file; every problem is named at once."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="give the path of the pipeline's YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start + 1} belongs to no character", hint="save the file as UTF-8") from error
    except (yaml.YAMLError, ValueError) as error:  # a date that is none is a plain ValueError
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}", hint="check quotes and indentation there") from error
    try:
        config = PipelineConfig.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in error.errors(include_input=False))
        raise ConfigError(f"{path} is not a pipeline configuration: {problems}", hint="mend the keys named above") from error
    return _resolved(config, path.absolute().parent)


def _yaml_problem(error: Exception) -> str:
    """What is wrong and where, without the text itself: a line that cannot be read may well be the one with the password."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return "a character or a value in it cannot be read"
    problem = _YAML_NAME.sub(r"\1", error.problem or error.context or "it cannot be read")
    mark = error.problem_mark or error.context_mark
    return problem if mark is None else f"{problem}, line {mark.line + 1}, column {mark.column + 1}"


def _place(location: tuple[str | int, ...]) -> str:
    """A key of ours by its name. What stands where a key should be may be anything, a password too."""
    if "password" in location:
        location = location[: location.index("password") + 1]
    return ".".join(str(part) if isinstance(part, int) or _KEY.fullmatch(part) else "…" for part in location) or "file"


def _resolved(config: PipelineConfig, base: Path) -> PipelineConfig:
    """Paths in the file are relative to the file."""
    source = config.source
    if isinstance(source.password, FileReference):
        source = source.model_copy(update={"password": FileReference(file=base / source.password.file)})
    if source.spool is not None:
        source = source.model_copy(update={"spool": base / source.spool})
    if source.tls is not None:
        paths = {name: base / value for name in ("root_cert", "cert", "key") if (value := getattr(source.tls, name)) is not None}
        source = source.model_copy(update={"tls": source.tls.model_copy(update=paths)})
    found = {"source": source, "sink": config.sink.resolved(base), "state": base / config.state, "hash_key": config.hash_key}
    if isinstance(config.hash_key, FileReference):
        found["hash_key"] = FileReference(file=base / config.hash_key.file)
    return config.model_copy(update=found)
