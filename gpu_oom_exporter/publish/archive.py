"""The archive: incidents and log positions in one SQLite file, committed together.

A position and the incidents before it are one transaction: after a crash nothing is lost and nothing counted twice.
An incident is the same when stream, file and offset are; what is read again is not counted again.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpu_oom_exporter.model import Incident, LogOrigin, LogPosition, Recorded

SCHEMA = """
CREATE TABLE IF NOT EXISTS positions (
    stream TEXT PRIMARY KEY, file TEXT NOT NULL, head INTEGER NOT NULL, offset INTEGER NOT NULL, time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS incidents (
    id INTEGER PRIMARY KEY, stream TEXT NOT NULL, file TEXT NOT NULL, offset INTEGER NOT NULL, line INTEGER NOT NULL,
    time REAL NOT NULL, category TEXT NOT NULL, severity TEXT NOT NULL, fields TEXT NOT NULL, engine TEXT NOT NULL,
    version TEXT NOT NULL, origin TEXT NOT NULL, UNIQUE (stream, file, offset)
);
CREATE TABLE IF NOT EXISTS totals (category TEXT PRIMARY KEY, count INTEGER NOT NULL, last REAL NOT NULL);
"""

KEPT = 10_000
"""Incidents that are kept; the oldest are deleted, their totals stay."""

KEPT_POSITIONS_SECONDS = 30 * 86400.0
"""A stream that was not seen for a month does not come back."""

BUSY_SECONDS = 5.0


class ArchiveError(Exception):
    """The archive cannot be used; the sentence says which file and why."""


class Archive:
    """The file *path*, readable by its owner only. One thread uses it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._database: sqlite3.Connection | None = None

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            try:
                os.makedirs(os.path.dirname(self.path) or ".", mode=0o700, exist_ok=True)
                # created before SQLite does, so that it is never readable by others
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
                database = sqlite3.connect(self.path, timeout=BUSY_SECONDS, check_same_thread=False)
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                database.executescript(SCHEMA)
            except (sqlite3.Error, OSError) as err:
                raise ArchiveError(f"{self.path}: {err}") from err
            self._database = database
        return self._database

    def commit(self, found: Iterable[Recorded], positions: Mapping[str, LogPosition], now: float) -> list[Recorded]:
        """Store *found* and *positions* in one transaction; returns those of *found* that were new."""
        new = []
        try:
            with self._open() as database:
                for recorded in found:
                    if self._insert(database, recorded):
                        new.append(recorded)
                database.executemany(
                    "INSERT OR REPLACE INTO positions VALUES (?, ?, ?, ?, ?)",
                    [(stream, p.file, p.head, p.offset, now) for stream, p in positions.items()],
                )
                if new:
                    database.execute("DELETE FROM incidents WHERE id <= (SELECT max(id) FROM incidents) - ?", (KEPT,))
                    database.execute("DELETE FROM positions WHERE time < ?", (now - KEPT_POSITIONS_SECONDS,))
        except sqlite3.Error as err:
            self.close()
            raise ArchiveError(f"{self.path}: {err}") from err
        return new

    @staticmethod
    def _insert(database: sqlite3.Connection, recorded: Recorded) -> bool:
        incident = recorded.incident
        stored = database.execute(
            "INSERT OR IGNORE INTO incidents (stream, file, offset, line, time, category, severity, fields, engine, "
            "version, origin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                recorded.origin.stream,
                recorded.file,
                incident.offset,
                incident.line,
                recorded.time,
                incident.category,
                incident.severity,
                json.dumps(dict(incident.fields)),
                incident.engine,
                incident.version,
                json.dumps(asdict(recorded.origin)),
            ),
        )
        if stored.rowcount != 1:
            return False
        database.execute(
            "INSERT INTO totals VALUES (?, 1, ?) ON CONFLICT (category) DO UPDATE SET count = count + 1, "
            "last = max(last, excluded.last)",
            (incident.category, recorded.time),
        )
        return True

    def positions(self) -> dict[str, LogPosition]:
        """How far every stream was read."""
        rows = self._query("SELECT stream, file, head, offset FROM positions")
        return {stream: LogPosition(file, head, offset) for stream, file, head, offset in rows}

    def totals(self) -> dict[str, tuple[int, float]]:
        """Category → (how many since the archive began, when the last was)."""
        return {name: (count, last) for name, count, last in self._query("SELECT category, count, last FROM totals")}

    def since(self, time: float) -> list[Recorded]:
        """The incidents from *time* (unix seconds) on, oldest first."""
        rows = self._query(
            "SELECT file, offset, line, time, category, severity, fields, engine, version, origin FROM incidents "
            "WHERE time >= ? ORDER BY id",
            time,
        )
        return [
            Recorded(
                Incident(category, severity, json.loads(fields), line, offset, engine, version),
                LogOrigin(**json.loads(origin)),
                file,
                when,
            )
            for file, offset, line, when, category, severity, fields, engine, version, origin in rows
        ]

    def _query(self, statement: str, *values: float) -> list[Any]:
        try:
            return self._open().execute(statement, values).fetchall()
        except sqlite3.Error as err:
            self.close()
            raise ArchiveError(f"{self.path}: {err}") from err

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        if self._database is not None:
            self._database.close()
            self._database = None
