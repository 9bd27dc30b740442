"""Spark as sinks use it: which checkpoints a query can continue, settings of the session, and who reaches it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox.base.settings import load
from outbox.sink.running.checkpoint import Checkpoint
from outbox.sink.spark.session import FEW_ROWS, session
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets

pytestmark = leaves_sockets

TOPIC = "events"
PLAN = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n'
STRANGER = b"a stranger's object"


def answer_to_a_stranger(port: int) -> bytes:
    """Answer of Spark's RPC on a port to a Java object that is sent without a login.

    The formats: Spark's TransportFrameDecoder, RpcRequest (3) and RequestMessage, and Java's serialised String.
    """
    text = b"\xac\xed\x00\x05t" + struct.pack(">H", len(STRANGER)) + STRANGER
    name = b"MapOutputTracker"
    body = b"\0" + b"\1" + struct.pack(">H", 9) + b"127.0.0.1" + struct.pack(">i", port)
    body += struct.pack(">H", len(name)) + name + text
    message = b"\x03" + struct.pack(">qi", 1, len(body)) + body
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one, suppress(ConnectionError):
        one.sendall(struct.pack(">q", 8 + len(message)) + message)
        while len(answer) < 8 or len(answer) < struct.unpack(">q", answer[:8])[0]:
            received = one.recv(1 << 16)
            if not received:
                break
            answer += received
    return answer


def test_driver_takes_no_object_of_a_stranger(spark: SparkSession) -> None:
    port = spark.sparkContext.getConf().get("spark.driver.port")
    assert port is not None
    answer = answer_to_a_stranger(int(port))
    assert b"SaslMessage" in answer  # it expects a login first
    assert STRANGER not in answer


def test_another_session_has_sparks_own_settings_for_queries(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in FEW_ROWS} == FEW_ROWS
    assert {name: spark.newSession().conf.get(name) for name in FEW_ROWS} == {
        "spark.sql.codegen.wholeStage": "true",
        "spark.sql.shuffle.partitions": "200",
    }


@pytest.mark.parametrize("filters", ["", "# spark.ui.filters org.apache.spark.ui.JWSFilter\n"])
def test_a_ui_that_answers_everybody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: str) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    file = tmp_path / "spark.properties"
    file.write_text(f"spark.ui.enabled true\n{filters}")
    with raises("ui-open", str(file)):
        session(load(tmp_path, environment=False, spark_properties=file))


class TestCheckpoint:
    """Which checkpoints a query can continue, and where its next batch begins as far as the files say."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A checkpoint that Spark has just made. It begins at offset 5."""
        for name in ("offsets", "commits", "sources/0"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "metadata").write_text('{"id":"f65c8f5c-5b0f-4c2e-9f43-2e0ad3f5b7a1"}')
        (tmp_path / "sources/0/0").write_text('\0v1\n{"events":{"0":5}}')
        return tmp_path

    @pytest.fixture
    def found(self, spark: SparkSession, folder: Path) -> Checkpoint:
        return Checkpoint(spark, folder.as_uri())

    @staticmethod
    def write(folder: Path, planned: int, committed: int) -> None:
        """Let a query have planned and committed so many batches of ten events each."""
        for batch in range(planned):
            (folder / f"offsets/{batch}").write_text(f'{PLAN}{{"events":{{"0":{(batch + 1) * 10}}}}}')
        for batch in range(committed):
            (folder / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')

    @staticmethod
    def problem(found: Checkpoint, positions: dict[int, int], *topics: str) -> str:
        """Why a sink at these positions of its topics cannot continue it."""
        return found.problem(found.start(), dict.fromkeys(topics or [TOPIC], positions)) or ""

    def test_a_folder_without_files_is_new(self, spark: SparkSession, tmp_path: Path) -> None:
        found = Checkpoint(spark, (tmp_path / "missing").as_uri())
        assert (found.is_new(), found.start(), self.problem(found, {0: 0})) == (True, None, "")

    @pytest.mark.parametrize(("planned", "committed", "start"), [(0, 0, 5), (1, 0, 5), (1, 1, 10), (2, 1, 10)], ids=str)
    def test_it_is_continued_behind_the_last_committed_batch(
        self, found: Checkpoint, folder: Path, planned: int, committed: int, start: int
    ) -> None:
        """Also if the sink has applied what Spark has planned and not committed, or more."""
        self.write(folder, planned, committed)
        assert (found.is_new(), found.start(), found.is_pending()) == (False, {TOPIC: {0: start}}, planned > committed)
        assert [found.end(batch)[TOPIC][0] for batch in range(planned)] == [10, 20][:planned]
        for positions in ({0: start}, {0: start + 10}, {0: 99, 1: 3}):
            assert self.problem(found, positions) == ""

    @pytest.mark.parametrize("positions", [{0: 9}, {}, {1: 99}])
    def test_one_that_is_ahead_of_the_positions_is_not(
        self, found: Checkpoint, folder: Path, positions: dict[int, int]
    ) -> None:
        self.write(folder, 1, 1)
        assert "ahead" in self.problem(found, positions)

    @pytest.mark.parametrize("topics", [["other"], [TOPIC, "other"]])
    def test_one_of_other_topics_is_not(self, found: Checkpoint, folder: Path, topics: list[str]) -> None:
        self.write(folder, 1, 1)
        assert "other topics: events" in self.problem(found, {0: 99}, *topics)

    @pytest.mark.parametrize("content", ["", "\0v1\n", '\0v1\n{"events":{"0":', "\0" * 20])
    def test_the_beginning_is_needed_until_the_first_commit(
        self, found: Checkpoint, folder: Path, content: str
    ) -> None:
        self.write(folder, 1, 0)
        (folder / "sources/0/0").write_text(content)
        assert self.problem(found, {0: 99}) == "truncated or missing: sources/0/0"
        assert found.start() is None
        self.write(folder, 2, 1)
        assert (found.start(), self.problem(found, {0: 99})) == ({TOPIC: {0: 10}}, "")

    @pytest.mark.parametrize(
        ("file", "kept", "start"),
        [
            *((file, -1, 20) for file in ("metadata", "commits/1", "offsets/2")),
            ("offsets/1", -1, 10),
            ("offsets/1", len("v1"), 10),
        ],
    )
    def test_one_with_a_truncated_file_is_not_continued(
        self, found: Checkpoint, folder: Path, file: str, kept: int, start: int
    ) -> None:
        self.write(folder, 3, 2)
        (folder / file).write_text((folder / file).read_text()[:kept])
        assert self.problem(found, {0: 20}) == f"truncated or missing: {file}"
        assert found.start() == {TOPIC: {0: start}}, "the newest that is known"
        if file != "offsets/2":  # without it, the batch is planned again
            (folder / file).unlink()
            assert self.problem(found, {0: 20}) == f"truncated or missing: {file}"

    def test_one_that_has_lost_its_plans_is_not_continued(self, found: Checkpoint, folder: Path) -> None:
        self.write(folder, 3, 4)
        assert self.problem(found, {0: 99}) == "truncated or missing: offsets/3"
