"""Produce a record whose headers' names are any bytes, which confluent-kafka's Producer cannot: it takes text.

It calls librdkafka, which confluent-kafka has loaded, by way of ctypes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from confluent_kafka import cimpl

from outbox.base.settings import Settings
from outbox.kafka.clients import client_config
from tests.support.topic_reader import topic_of

PRODUCER, COPY, ERROR_BYTES, TIMEOUT_MS = 0, 2, 512, 30_000
TOPIC, PARTITION, VALUE, KEY, FLAGS, HEADER = 1, 3, 4, 5, 7, 9  # rd_kafka_vtype_t
CONTENT_BYTES = 64  # of an argument, behind its type: rd_kafka_vu_t


def produce(settings: Settings, key: bytes, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Write a record to partition 0 of the topic of the test's rows, and wait until the brokers have it."""
    library = ctypes.CDLL(cimpl.__file__)  # symbols of what it depends on are found too
    for function in (library.rd_kafka_conf_new, library.rd_kafka_new, library.rd_kafka_produceva):
        function.restype = ctypes.c_void_p
    kept: list[ctypes.Array[ctypes.c_char]] = []  # what an argument points at

    def argument(type_: int, *content: int | bytes) -> bytes:
        words = b"".join(struct.pack("q", one if isinstance(one, int) else address(one)) for one in content)
        return struct.pack("q", type_) + words.ljust(CONTENT_BYTES, b"\0")

    def address(content: bytes) -> int:
        kept.append(ctypes.create_string_buffer(content))
        return ctypes.addressof(kept[-1])

    arguments = [argument(TOPIC, topic_of(settings).encode()), argument(PARTITION, 0), argument(FLAGS, COPY)]
    arguments += [argument(KEY, key, len(key)), argument(VALUE, value, len(value))]
    arguments += [argument(HEADER, name, content, len(content)) for name, content in headers]
    producer = _producer(library, settings)
    try:
        assert not library.rd_kafka_produceva(producer, b"".join(arguments), ctypes.c_size_t(len(arguments)))
        assert library.rd_kafka_flush(producer, TIMEOUT_MS) == 0
    finally:
        library.rd_kafka_destroy(producer)


def _producer(library: ctypes.CDLL, settings: Settings) -> ctypes.c_void_p:
    error = ctypes.create_string_buffer(ERROR_BYTES)
    configuration = ctypes.c_void_p(library.rd_kafka_conf_new())
    for name, option in client_config(settings).items():
        words = (name.encode(), str(option).encode())
        assert library.rd_kafka_conf_set(configuration, *words, error, ERROR_BYTES) == 0, error.value
    producer = library.rd_kafka_new(PRODUCER, configuration, error, ctypes.c_size_t(ERROR_BYTES))
    assert producer, error.value
    return ctypes.c_void_p(producer)
