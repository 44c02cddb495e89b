"""The pipeline configuration: one YAML file. Each option is declared once, in a model of this package.

Relative paths are relative to the file. Secrets are references. They are resolved when they are used, not
when the file is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from typing_extensions import override

from penstock import storage
from penstock.capture.settings import CaptureLimits, CaptureMethod, CaptureSettings, Confirm, PollingRules
from penstock.config.policies import (
    ExistingPolicy,
    RefusedPolicy,
    Route,
    SchemaPolicy,
    SchemaRule,
    check_routes,
)
from penstock.config.secrets import EnvReference, FileReference, Model, checked_duration, parse_seconds
from penstock.config.sink import MaintenanceConfig, SinkConfig
from penstock.config.source import PollingConfig, SourceConfig, capture_option
from penstock.config.tables import TableRule, build_transform
from penstock.errors import ConfigError
from penstock.postgres.publication import PREFIX
from penstock.postgres.types.column import TypePolicy
from penstock.schema import TableName
from penstock.secret import Secret
from penstock.sinks.modes import Mode
from penstock.transforms.transform import Transform

_PIPELINE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_KEY = re.compile(r"\w{1,40}")
_YAML_NAME = re.compile(r"(alias|anchor|tag|handle) (['\"]).*\2")


class SparkConfig(Model):
    """The Spark application."""

    master: str | None = Field(
        default=None, description="Spark master URL. Default: the one given to spark-submit, else `local[*]`."
    )
    packages: tuple[str, ...] = Field(
        default=(),
        description="Maven coordinates of the sink's packages. Default: those that match the running "
        "Spark. Under "
        "spark-submit, use its `--packages` instead.",
    )
    conf: dict[str, str | EnvReference | FileReference] = Field(
        default_factory=dict,
        description="Spark settings; they override those of Penstock. Give a secret by reference, `{env: "
        "NAME}` or "
        "`{file: PATH}`: then it does not appear in the arguments of the JVM or in the Spark UI.",
    )

    def settings(self) -> dict[str, str | Secret]:
        """Return the Spark settings with their secrets resolved."""
        return {
            name: value if isinstance(value, str) else value.resolve() for name, value in self.conf.items()
        }

    def resolved(self, base: Path) -> SparkConfig:
        """Return this section with relative paths resolved against `base`, the directory of the file."""
        conf = {
            name: FileReference(file=base / each.file) if isinstance(each, FileReference) else each
            for name, each in self.conf.items()
        }
        return self.model_copy(update={"conf": conf})


class TypesConfig(Model):
    """Mapping of Postgres types that Spark cannot represent exactly."""

    numeric: str = capture_option("numeric")
    on_unrepresentable: Literal["null", "error"] = Field(
        default="null",
        description="For a value out of the range of its type: `null` writes NULL, and the exact text to "
        "`_exact`; `error` "
        "rejects the row (see `refused`).",
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


class _MatchingRules:
    """Finds the rules that match a table. Stores them by table, because an epoch needs several settings of
    every table, and a pipeline may have a thousand rules.
    """

    def __init__(self, tables: tuple[TableRule, ...]) -> None:
        self.tables = tables
        self._found: dict[TableName, list[TableRule]] = {}

    def of(self, name: TableName) -> list[TableRule]:
        found = self._found.get(name)
        if found is None:
            routed = [rule for rule in self.tables if rule.route is not None and rule.route.into == name]
            found = self._found[name] = routed or [rule for rule in self.tables if rule.selects(name)]
        return found


class PipelineConfig(Model):
    """Configuration of one pipeline."""

    pipeline: str = Field(
        description="Name of the pipeline: lower-case letters, digits and underscores, at most 40, a "
        "letter first."
    )
    source: SourceConfig = Field(description="The source database.")
    tables: Annotated[
        tuple[TableRule, ...], Field(min_length=1, description="The tables to replicate, and their options.")
    ]
    sink: SinkConfig = Field(description="The target.")
    mode: Mode | None = Field(
        None,
        description="Content of the target tables. `mirror` (default): the source's rows. `soft_delete`: "
        "deleted rows stay, "
        "flagged. `history`: every version of every row. `append`: every change. The Parquet sink supports "
        "only `append`.",
    )
    state: Path = Field(
        Path("state"),
        description="State directory, with spool and checkpoint, on a volume that all executors can access.",
    )
    trigger: str = Field("1 second", description="Minimum time between the starts of two epochs.")
    max_rows_per_epoch: int = Field(
        1_000_000,
        gt=0,
        description="Maximum number of changes in one epoch. An epoch has whole segments of the spool, at "
        "least one.",
    )
    max_spool_bytes: int = capture_option("spoolBytes", gt=0)
    confirm: Confirm = capture_option("confirm")
    max_retained_wal: int | None = capture_option("maxRetainedWal", gt=0)
    snapshot_chunk_bytes: int = Field(
        128 << 20,
        ge=8192,
        description="Maximum heap bytes of one snapshot chunk, which one task reads and writes to one "
        "file. Small tables get "
        "smaller chunks.",
    )
    max_snapshot_hold: str = Field(
        "1 hour",
        description="Maximum time to hold one exported snapshot open. A longer copy continues with a new "
        "one.",
    )
    schema_changes: SchemaPolicy = Field(
        SchemaPolicy.EVOLVE,
        description="On a schema change of a table: `evolve` changes the target, and resyncs a mirror "
        "where that is not "
        "possible. `additive` adds and widens columns; any other change fails the table. `ignore` keeps "
        "the target's columns: "
        "new columns are left out, dropped ones become NULL. `stop` fails the table.",
    )
    hash_key: EnvReference | FileReference | None = Field(
        None, description="HMAC key for `columns.hash`: `{env: NAME}` or `{file: PATH}`."
    )
    existing: ExistingPolicy = Field(
        ExistingPolicy.REFUSE,
        description="When the target already contains a table that this pipeline did not create: `refuse` "
        "fails the table. "
        "`adopt` takes it over, and replaces its rows when a snapshot is complete. `replace` deletes it "
        "with all its data.",
    )
    refused: RefusedPolicy = Field(
        RefusedPolicy.STOP,
        description="When a row is rejected: `stop` fails its table. `dead_letters` writes the row to the "
        "dead-letter queue, "
        "and the table continues.",
    )
    maintenance: MaintenanceConfig = Field(
        MaintenanceConfig(), description="Compaction and retention of the target tables."
    )
    types: TypesConfig = Field(TypesConfig(), description="Type mapping.")
    spark: SparkConfig = Field(SparkConfig(), description="Settings of the Spark application.")
    _removed: frozenset[TableName] = PrivateAttr(frozenset())

    @model_validator(mode="after")
    def _has_types(self) -> PipelineConfig:
        if self.sink.postgres is not None and "numeric" in self.types.model_fields_set:
            raise ValueError(
                "types.numeric has no effect with sink.postgres, whose columns are numeric too: remove it"
            )
        return self

    @model_validator(mode="after")
    def _has_log(self) -> PipelineConfig:
        if self.max_retained_wal is not None and not self.capture_method.uses_publication:
            raise ValueError(
                f"max_retained_wal has no effect with capture: {self.source.capture}, which retains no "
                "WAL: remove it"
            )
        return self

    @model_validator(mode="after")
    def _keeps_long(self) -> PipelineConfig:
        if self.sink.delta is not None and self.maintenance.delta_keep_seconds < 3600:
            raise ValueError(
                "maintenance.keep must be at least 1 hour for sink.delta, so that files in use are not "
                "removed"
            )
        return self

    @model_validator(mode="after")
    def _has_modes(self) -> PipelineConfig:
        other = [
            mode
            for mode in (self.mode, *(rule.mode for rule in self.tables))
            if mode not in (None, *self.sink.modes)
        ]
        if other:
            raise ValueError(f"this sink supports mode {' or '.join(self.sink.modes)}, not {other[0]}")
        return self

    @model_validator(mode="after")
    def _has_hash_key(self) -> PipelineConfig:
        if self.hash_key is None and any(
            rule.columns is not None and rule.columns.hash for rule in self.tables
        ):
            raise ValueError(
                "columns.hash needs hash_key: add hash_key: {env: NAME}, with a long random text in that "
                "variable"
            )
        return self

    @model_validator(mode="after")
    def _has_routes(self) -> PipelineConfig:
        check_routes(rule.route for rule in self.tables)
        return self

    @field_validator("pipeline")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _PIPELINE.fullmatch(value):
            raise ValueError(
                "a pipeline name consists of lower-case letters, digits and underscores, at most 40, a "
                "letter first"
            )
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
    def capture_method(self) -> CaptureMethod:
        return CaptureMethod(self.source.capture)

    @property
    def published_by(self) -> str | None:
        """The publication whose column lists and row filters apply; None if the capture method uses no
        publication.
        """
        return self.publication if self.capture_method.uses_publication else None

    @property
    def origin(self) -> str:
        """Origin of the spool's changes: the publication, or the capture method if it uses none."""
        return self.published_by or self.source.capture

    @property
    def owns_publication(self) -> bool:
        """Whether the pipeline may drop tables from the publication. A publication named in the file, or of a
        shared capture, may have other readers.
        """
        return self.source.publication is None and self.source.process == "embedded"

    @property
    def polling_rules(self) -> PollingRules | None:
        """The polling options; None unless the capture method is `polling`."""
        if self.capture_method is not CaptureMethod.POLLING:
            return None
        return (self.source.polling or PollingConfig()).rules(self.state)

    @property
    def type_policy(self) -> TypePolicy:
        """Mapping of types. With a Postgres sink, values keep their Postgres text form."""
        return (
            replace(self.types.policy, form="text") if self.sink.postgres is not None else self.types.policy
        )

    @property
    def spool(self) -> Path:
        return self.source.spool or self.state / "spool"

    @property
    def checkpoint(self) -> Path:
        return self.state / "checkpoint"

    @property
    def lock(self) -> Path:
        """The lock file, held by the JVM of the running pipeline."""
        return self.state / "pipeline.lock"

    @property
    def barriers(self) -> Path:
        return self.state / "barriers"

    @property
    def named_tables(self) -> list[TableName]:
        named = [TableName.parse(rule.table) for rule in self.tables if rule.table is not None]
        return [name for name in named if name not in self._removed]

    def selects(self, name: TableName) -> bool:
        """Whether this source table is selected, for its own target or as a member of a routed table."""
        route = self.route_of(name)
        return (
            name not in self._removed
            and not (route and route.into in self._removed)
            and any(rule.selects(name) for rule in self.tables)
        )

    def route_of(self, name: TableName) -> Route | None:
        """The route of this source table; None if the table is not routed into another target."""
        if not self.is_routing:
            return None
        return next(
            (rule.route for rule in reversed(self.tables) if rule.into is not None and rule.selects(name)),
            None,
        )

    @property
    def is_routing(self) -> bool:
        return any(rule.into is not None for rule in self.tables)

    def has(self, name: TableName) -> bool:
        """Whether the pipeline has a table with this name: a source table with its own target, or a target
        that other tables are routed into.
        """
        is_target = any(
            route is not None and route.into == name for route in (rule.route for rule in self.tables)
        )
        return (is_target and name not in self._removed) or (
            self.selects(name) and self.route_of(name) is None
        )

    def rules_of(self, name: TableName) -> list[TableRule]:
        """The rules that match a table of the pipeline. For each key, the last rule that sets it applies."""
        return self._matching_rules.of(name)

    @cached_property
    def _matching_rules(self) -> _MatchingRules:
        return _MatchingRules(self.tables)

    @override
    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        if copied.tables is not self.tables:
            vars(copied).pop("_matching_rules", None)
        return copied

    def mode_of(self, name: TableName) -> Mode:
        said = next((rule.mode for rule in reversed(self.rules_of(name)) if rule.mode is not None), self.mode)
        return said or self.sink.modes[0]

    def source_mode(self, name: TableName) -> Mode:
        """The table mode of the target that this source table belongs to."""
        route = self.route_of(name)
        return self.mode_of(name if route is None else route.into)

    def unkeyed(self, names: Iterable[TableName]) -> list[TableName]:
        """The tables among `names` that need no key, because their targets have table mode append."""
        return [name for name in names if self.source_mode(name).is_log]

    def schema_rule(self, name: TableName) -> SchemaRule:
        said = (
            rule.schema_changes for rule in reversed(self.rules_of(name)) if rule.schema_changes is not None
        )
        return SchemaRule(
            next(said, self.schema_changes), self.mode_of(name).can_resync, self.transform_of(name)
        )

    def transform_of(self, name: TableName) -> Transform | None:
        """The transform of the table's rows; None if the rows are not transformed."""
        rule = next((rule for rule in reversed(self.rules_of(name)) if rule.transforms), None)
        return (
            None
            if rule is None
            else build_transform(rule, self.hash_key, needs_key=not self.mode_of(name).is_log)
        )

    def existing_policy(self, name: TableName) -> ExistingPolicy:
        said = (rule.existing for rule in reversed(self.rules_of(name)) if rule.existing is not None)
        return next(said, self.existing)

    def refused_policy(self, name: TableName) -> RefusedPolicy:
        said = (rule.refused for rule in reversed(self.rules_of(name)) if rule.refused is not None)
        return next(said, self.refused)

    def with_tables(self, added: Iterable[TableName], removed: Iterable[TableName]) -> PipelineConfig:
        """Return the configuration with the tables `added`, and without the tables `removed`."""
        rules = [
            TableRule.model_validate({"table": str(name)})
            for name in added
            if not self.has(name) and not self.selects(name)
        ]
        changed = self.model_copy(update={"tables": (*self.tables, *rules)} if rules else None)
        changed._removed = frozenset(removed)  # noqa: SLF001 an attribute of this class
        return changed

    def capture_settings(
        self, *, quiet_seconds: float | None = None, tables: Iterable[TableName] = ()
    ) -> CaptureSettings:
        """Return the settings of the capture.

        Without `tables`, the capture creates neither publication nor slot. The pipeline creates them, because
        a lost slot must not be recreated silently.
        """
        limits = CaptureLimits(spool_bytes=self.max_spool_bytes)
        if quiet_seconds is not None:
            limits = replace(limits, quiet_seconds=quiet_seconds)
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
            by_triggers=self.capture_method is CaptureMethod.TRIGGER,
            old_rows=self.source.old_rows,
        )


def load_config(path: Path) -> PipelineConfig:
    """Load and validate a configuration file. The error lists every problem."""
    try:
        document = yaml.safe_load(storage.read_text(path))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", hint="give the path of the pipeline's YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8: byte {error.start + 1} is invalid", hint="save the file as UTF-8"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # an invalid date is a plain ValueError
        raise ConfigError(
            f"{path} is not valid YAML: {_yaml_problem(error)}",
            hint="check the quotes and the indentation there",
        ) from error
    try:
        config = PipelineConfig.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(
            f"{_place(each['loc'])}: {each['msg']}" for each in error.errors(include_input=False)
        )
        raise ConfigError(
            f"{path} is not a valid pipeline configuration: {problems}", hint="correct the keys named above"
        ) from error
    return _resolved(config, path.absolute().parent)


def _yaml_problem(error: Exception) -> str:
    """Describe the problem and its place without quoting the file, which may contain a password."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return "it has an invalid character or value"
    problem = _YAML_NAME.sub(r"\1", error.problem or error.context or "it cannot be parsed")
    mark = error.problem_mark or error.context_mark
    return problem if mark is None else f"{problem}, line {mark.line + 1}, column {mark.column + 1}"


def _place(location: tuple[str | int, ...]) -> str:
    """The path of a key in the file. Text that does not look like a key is hidden, because it may be a
    password.
    """
    if "password" in location:
        location = location[: location.index("password") + 1]
    return (
        ".".join(str(part) if isinstance(part, int) or _KEY.fullmatch(part) else "…" for part in location)
        or "file"
    )


def _resolved(config: PipelineConfig, base: Path) -> PipelineConfig:
    """Return the configuration with all relative paths resolved against `base`, the directory of the file."""
    source = config.source
    if isinstance(source.password, FileReference):
        source = source.model_copy(update={"password": FileReference(file=base / source.password.file)})
    if source.spool is not None:
        source = source.model_copy(update={"spool": base / source.spool})
    if source.tls is not None:
        paths = {
            name: base / value
            for name in ("root_cert", "cert", "key")
            if (value := getattr(source.tls, name)) is not None
        }
        source = source.model_copy(update={"tls": source.tls.model_copy(update=paths)})
    found: dict[str, object] = {
        "source": source,
        "sink": config.sink.resolved(base),
        "state": base / config.state,
        "spark": config.spark.resolved(base),
    }
    if isinstance(config.hash_key, FileReference):
        found["hash_key"] = FileReference(file=base / config.hash_key.file)
    return config.model_copy(update=found)
