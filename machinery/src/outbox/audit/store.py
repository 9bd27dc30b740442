"""The rows of a check in DuckDB: in memory up to a limit, and beyond it in a temporary folder.

Event ids are masked by a random number, so that nobody can choose ids that DuckDB hashes alike. The macro ``masked``
masks an id, and unmasks a masked one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from outbox.base.errors import Failure

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "512MB",
    "threads": min(os.cpu_count() or 1, 2),  # more have too little memory each
    "preserve_insertion_order": False,
    "autoinstall_known_extensions": False,
}
FETCH_ROWS = 10_000
FOLDER_PREFIX = "outbox-check-"
# A program without a file, such as `python -c`, is a notebook to DuckDB, which then draws on its standard output.
SCHEMA = """
SET enable_progress_bar = false;
CREATE MACRO masked(id) AS xor(id::UUID::UHUGEINT, {mask}::UHUGEINT)::UUID;
CREATE MACRO made_at_ms(id) AS
    CASE WHEN uuid_extract_version(masked(id)) = 7 THEN epoch_ms(uuid_extract_timestamp(masked(id))) ELSE 0 END;

-- Events on the topics, each as often as it is there. `numbers` are texts, in the order of the topic's properties.
CREATE TABLE delivered (
    topic USMALLINT, kind USMALLINT, id UUID, key VARCHAR, version BIGINT, partition INTEGER, "offset" BIGINT,
    numbers VARCHAR[]
);
-- Records that break the contract. `id` is null if `identity` is a hash.
CREATE TABLE refused (
    topic USMALLINT, identity VARCHAR, id UUID, key VARCHAR, partition INTEGER, "offset" BIGINT, reason VARCHAR,
    detail VARCHAR
);
"""


class Store:
    """Tables `delivered` and `refused`, and those that a comparison makes."""

    ROWS: ClassVar = {  # the columns of rows that are compared
        **{"comparison": pa.uint16(), "sink": pa.string(), "key": pa.string()},
        **{"version": pa.int64(), "columns": pa.string()},
    }

    def __init__(self) -> None:
        self._closing = ExitStack()
        # Not with the module: `outbox check` freezes what is imported before, and DuckDB's binding complains of that.
        import duckdb

        folder = self._closing.enter_context(_temporary_folder())
        connection = duckdb.connect(config={**CONFIG, "temp_directory": str(folder)})
        self._connection = self._closing.enter_context(connection)
        self.run(SCHEMA.format(mask=secrets.randbits(128)))

    def close(self) -> None:
        """Forget everything, and delete the temporary folder."""
        self._closing.close()

    def run(self, program: str, **tables: pa.Table) -> None:
        """Run statements. They may read these Arrow tables by name."""
        with _errors():
            for name, table in tables.items():
                self._connection.register(name, table)
            self._connection.execute(program)
            for name in tables:
                self._connection.unregister(name)

    def load(
        self, name: str, types: Mapping[str, pa.DataType], rows: Iterable[Sequence[Any]], columns: str = "*"
    ) -> None:
        """Make a table of rows, in place of the last one with this name. ``columns`` are an expression of SQL."""
        schema, rows = pa.schema(types), iter(rows)
        made = f"SELECT {columns} FROM new_rows"  # noqa: S608 - of our own making
        self.run(f"CREATE OR REPLACE TABLE {name} AS {made}", new_rows=schema.empty_table())
        while some := list(islice(rows, FETCH_ROWS)):
            arrays = map(pa.array, zip(*some, strict=True), schema.types)
            self.run(f"INSERT INTO {name} {made}", new_rows=pa.table(list(arrays), schema))

    def make(self, name: str, query: str, passes: int) -> None:
        """Make a table of a query's rows in so many passes, because DuckDB does not join any number of rows within its
        memory. ``query`` has the fields ``passes`` and ``number``.
        """
        self.run(f"CREATE OR REPLACE TABLE {name} AS {query.format(passes=passes, number=-1)}")
        for number in range(passes):
            self.run(f"INSERT INTO {name} {query.format(passes=passes, number=number)}")

    def rows(self, query: str, values: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, which may be more than fit into memory. Read them before the next statement."""
        with _errors():
            cursor = self._connection.execute(query, values or {})
            while rows := cursor.fetchmany(FETCH_ROWS):
                yield from rows


@contextmanager
def _errors() -> Iterator[None]:
    import duckdb

    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        raise Failure(
            f"no room for the rows of the check in {tempfile.gettempdir()}: {str(error).partition(chr(10))[0]}",
            "point TMPDIR at a folder with some 100 bytes free for each event of the topics and each row of the outbox",
            code="no-room",
        ) from error


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder that no other user can read. Also deletes folders of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    try:
        # Others look at the final name only, so they never find this folder unlocked.
        hidden = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}"))
    except OSError as error:
        raise Failure(
            f"temporary files in {tempfile.gettempdir()}: {error.strerror}",
            "point TMPDIR at a folder that can be written",
            code="no-room",
        ) from error
    with _locked(hidden):
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on a folder that ends with this process. Raises OSError if another process has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
