"""The settings of Spark: ours are those of our session, and what it shows of itself is for who has the token."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox.base.settings import load
from outbox.sink.spark.session import FEW_ROWS, session
from outbox_lab.testing.failures import raises

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
