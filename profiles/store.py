"""runs.db: measurements by cell and metrics by accuracy key, in SQLite. Finished rows survive what comes after them."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import JSON, Engine, Float, Integer, String, create_engine, event, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from converters.errors import EdgeVitError

Status = Literal["ok", "failed", "not_run", "wrong_on_device"]


@dataclass(frozen=True)
class Cell:
    """What identifies a measurement: merging, resuming and ranking all go by these."""

    artifact_sha256: str
    size: str
    batch: int
    runtime: str
    runtime_version: str
    accelerator: str
    threads: int
    device_id: str
    os_build: str
    protocol_version: int

    @property
    def key(self) -> str:
        return _key(self)


@dataclass(frozen=True)
class AccuracyKey:
    """What identifies a metric's value. `artifact_sha256` is a checkpoint's hash where a checkpoint was measured."""

    artifact_sha256: str
    size: str
    accelerator: str
    data_sha256: str
    split: str
    crop: float

    @property
    def key(self) -> str:
        return _key(self)


@dataclass(frozen=True)
class Metric:
    """One figure with its 95 % interval over `n` examples, in the metric's own unit (accuracy: 0 to 1)."""

    name: str
    value: float
    low: float
    high: float
    n: int
    higher_is_better: bool = True


@dataclass(frozen=True)
class Measurement:
    """One cell with every sample kept.

    `processes` holds, for each fresh process, what the runner printed: `wall_ms` and `cpu_ms` lists and more.
    `summary` is computed from them. `artifact` describes the file: name, model, format, precision, size_bytes, flops.
    `reason` says in one line why a cell has no numbers.
    """

    cell: Cell
    status: Status
    artifact: dict[str, Any]
    reason: str = ""
    processes: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    circumstances: dict[str, Any] = field(default_factory=dict)
    created_at: str = ""


class _Base(DeclarativeBase):
    pass


class _MeasurementRow(_Base):
    __tablename__ = "measurements"

    key: Mapped[str] = mapped_column(String, primary_key=True)
    cell: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(String)
    reason: Mapped[str] = mapped_column(String)
    artifact: Mapped[dict[str, Any]] = mapped_column(JSON)
    processes: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    summary: Mapped[dict[str, Any]] = mapped_column(JSON)
    circumstances: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[str] = mapped_column(String)


class _MetricRow(_Base):
    __tablename__ = "metrics"

    key: Mapped[str] = mapped_column(String, primary_key=True)
    name: Mapped[str] = mapped_column(String, primary_key=True)
    accuracy_key: Mapped[dict[str, Any]] = mapped_column(JSON)
    data_name: Mapped[str] = mapped_column(String)
    value: Mapped[float] = mapped_column(Float)
    low: Mapped[float] = mapped_column(Float)
    high: Mapped[float] = mapped_column(Float)
    n: Mapped[int] = mapped_column(Integer)
    higher_is_better: Mapped[int] = mapped_column(Integer)
    created_at: Mapped[str] = mapped_column(String)


class Store:
    """Opens (or makes) a runs.db. Raises EdgeVitError when the file is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = _open(path)

    def measurements(self) -> list[Measurement]:
        with self._session() as session:
            rows = session.scalars(select(_MeasurementRow).order_by(_MeasurementRow.created_at)).all()
            return [_to_measurement(row) for row in rows]

    def measurement(self, cell: Cell) -> Measurement | None:
        with self._session() as session:
            row = session.get(_MeasurementRow, cell.key)
            return _to_measurement(row) if row else None

    def add_measurement(self, measurement: Measurement) -> None:
        """Committed when it returns; replaces an earlier row of the same cell."""
        row = asdict(measurement) | {"key": measurement.cell.key, "created_at": measurement.created_at or _now()}
        with self._session() as session, session.begin():
            session.execute(insert(_MeasurementRow).values(**row).on_conflict_do_update(["key"], set_=row))

    def metric(self, key: AccuracyKey, name: str = "accuracy") -> Metric | None:
        with self._session() as session:
            row = session.get(_MetricRow, (key.key, name))
            return _to_metric(row) if row else None

    def metrics(self) -> list[tuple[AccuracyKey, str, Metric]]:
        """Every metric with its key and its data set's name."""
        with self._session() as session:
            rows = session.scalars(select(_MetricRow).order_by(_MetricRow.created_at)).all()
            return [(AccuracyKey(**row.accuracy_key), row.data_name, _to_metric(row)) for row in rows]

    def add_metric(self, key: AccuracyKey, data_name: str, metric: Metric) -> None:
        row = asdict(metric) | {"higher_is_better": int(metric.higher_is_better)}
        row |= {"key": key.key, "accuracy_key": asdict(key), "data_name": data_name, "created_at": _now()}
        with self._session() as session, session.begin():
            session.execute(insert(_MetricRow).values(**row).on_conflict_do_update(["key", "name"], set_=row))

    @contextmanager
    def _session(self) -> Iterator[Session]:
        try:
            with Session(self._engine) as session:
                yield session
        except DatabaseError as error:
            raise EdgeVitError(f"{self.path}: {str(error.orig).splitlines()[0]}; move it away to start anew") from error


def _open(path: Path) -> Engine:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(f"sqlite:///{path}")
        event.listen(engine, "connect", _set_pragmas)
        _Base.metadata.create_all(engine)
    except OSError as error:
        raise EdgeVitError(f"{path}: cannot write there ({error.strerror})") from error
    except DatabaseError as error:
        raise EdgeVitError(f"{path}: not a runs.db ({str(error.orig).splitlines()[0]})") from error
    return engine


def _set_pragmas(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA busy_timeout=30000")


def _key(item: Cell | AccuracyKey) -> str:
    return hashlib.sha256(json.dumps(asdict(item), sort_keys=True).encode()).hexdigest()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def _to_measurement(row: _MeasurementRow) -> Measurement:
    names = ("status", "reason", "artifact", "processes", "summary", "circumstances", "created_at")
    return Measurement(Cell(**row.cell), **{name: getattr(row, name) for name in names})


def _to_metric(row: _MetricRow) -> Metric:
    return Metric(row.name, row.value, row.low, row.high, row.n, bool(row.higher_is_better))
