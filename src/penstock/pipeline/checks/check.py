"""`check_pipeline`: tries what a run needs before its first row, and names all that is in its way at once.

It takes the real actions where that is possible without a trace: connections are opened, a temporary slot is made, the publication is
created and rolled back, a block of each table is read as a snapshot reads it, files and a table are written and removed again; what earlier
runs have left is looked at as a run would. No Spark session is started, unless a table has a query that only Spark can read, and nothing
is left behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.errors import PenstockError
from penstock.pipeline.checks.findings import CheckReport, Step
from penstock.pipeline.checks.places import check_places
from penstock.pipeline.checks.source import SOURCE_STEPS, check_source
from penstock.pipeline.config import PipelineConfig, load_config


def check_pipeline(path: Path) -> CheckReport:
    """Check the configuration file at `path`, the source that it names, and the places that it writes to."""
    configuration = Step("configuration", str(path))
    config: PipelineConfig | None = None
    with configuration.catching():
        config = load_config(path)
    if config is None:
        return CheckReport(None, [configuration])
    return CheckReport(config.pipeline, [configuration, *_steps(config, configuration)])


def _steps(config: PipelineConfig, configuration: Step) -> list[Step]:
    try:
        address = config.source.address()
    except PenstockError as error:
        configuration.problem(error)
        return [*(Step(name, is_skipped=True) for name in SOURCE_STEPS), *check_places(config)]
    try:
        return [*check_source(config, address), *check_places(config)]
    finally:
        _end_spark()


def _end_spark() -> None:
    """If it had to be started."""
    queries = sys.modules.get("penstock.spark.query_session")
    if queries is not None:
        queries.end_started()
