"""Produce a record whose headers' names are any bytes, which confluent-kafka's Producer cannot: it takes text.

It calls librdkafka, which confluent-kafka has loaded, by way of ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from confluent_kafka import cimpl

from outbox.base.settings import Settings
from outbox.kafka.clients import client_config
from tests.support.topic_reader import topic_of

PRODUCER, COPY, ERROR_BYTES, TIMEOUT_MS = 0, 2, 512, 30_000
TOPIC, PARTITION, VALUE, KEY, FLAGS, HEADER = 1, 3, 4, 5, 7, 9  # rd_kafka_vtype_t


class _Memory(ctypes.Structure):
    _fields_ = (("content", ctypes.c_char_p), ("size", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("content", ctypes.c_char_p), ("size", ctypes.c_ssize_t))


class _Content(ctypes.Union):
    _fields_ = (
        ("text", ctypes.c_char_p),
        ("number", ctypes.c_int32),
        ("memory", _Memory),
        ("header", _Header),
        ("padding", ctypes.c_char * 64),
    )


class _Argument(ctypes.Structure):
    """``rd_kafka_vu_t``."""

    _fields_ = (("type", ctypes.c_int), ("content", _Content))


def produce(settings: Settings, key: bytes, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Write a record to partition 0 of the topic of the test's rows, and wait until the brokers have it."""
    library = ctypes.CDLL(cimpl.__file__)  # symbols of what it depends on are found too
    for function in (library.rd_kafka_conf_new, library.rd_kafka_new, library.rd_kafka_produceva):
        function.restype = ctypes.c_void_p
    producer = _producer(library, settings)
    try:
        arguments = [
            _Argument(TOPIC, _Content(text=topic_of(settings).encode())),
            _Argument(PARTITION, _Content(number=0)),
            _Argument(FLAGS, _Content(number=COPY)),
            _Argument(KEY, _Content(memory=_Memory(key, len(key)))),
            _Argument(VALUE, _Content(memory=_Memory(value, len(value)))),
            *(_Argument(HEADER, _Content(header=_Header(*pair, len(pair[1])))) for pair in headers),
        ]
        vector = (_Argument * len(arguments))(*arguments)
        assert not library.rd_kafka_produceva(producer, vector, ctypes.c_size_t(len(arguments)))
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
