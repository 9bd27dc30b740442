"""Which requests are the same to an Idempotency-Key."""

from __future__ import annotations

import pytest

from outbox.http.idempotency import Key


def key(body: str = "", method: str = "POST", path: str = "/items", query: bytes = b"") -> Key:
    return Key.of_request("k", 24, method=method, route="/items", path=path, query=query, body=body.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": {"c": 2.50, "d": null}}', '{ "b" : {"d":null,"c":2.50},\n"a":1}'),
        ('{"a": "\\u00e9"}', '{"a": "\u00e9"}'),
        ("{}", ""),
    ],
)
def test_a_body_written_otherwise_is_the_same_request(one: str, other: str) -> None:
    assert key(one) == key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"price": 0.1}', '{"price": 0.10000000000000000001}'),
        ('{"price": 1}', '{"price": "1"}'),
        ('{"a": {"b": []}}', '{"a": {"b": {}}}'),
        ('{"a": 1}', ""),
    ],
)
def test_another_body_is_another_request(one: str, other: str) -> None:
    assert key(one).request_hash != key(other).request_hash


def test_method_path_and_query_are_of_the_request() -> None:
    others = (key(), key(method="PUT"), key(path="/items/1"), key(query=b"a=1"), key(path="/items?a=1"))
    assert len({one.request_hash for one in others}) == len(others)
    assert key().route != key(method="PUT").route
