"""`$ref` between schema files: what is resolved, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.events.references import bundle
from outbox.events.schema import Column, PayloadSchema
from outbox_lab.testing.failures import raises


def write(folder: Path, **files: Any) -> Path:
    """Write `a__b={…}` as a/b.schema.json. Returns the folder of events."""
    for name, content in files.items():
        file = folder / f"{name.replace('__', '/')}.schema.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def resolved(folder: Path, name: str = "order/placed") -> PayloadSchema:
    return PayloadSchema("placed", bundle(folder / f"{name}.schema.json", folder))


def refer(reference: str) -> dict[str, Any]:
    return {"properties": {"it": {"$ref": reference}}, "required": ["it"]}


COMMON = {
    "$id": "urn:common",
    "$defs": {"code": {"type": "string", "pattern": "^[A-Z]$"}, "a/b~c %d": {"type": "boolean"}},
}


@pytest.mark.parametrize(
    ("reference", "type_"),
    [
        ("../common.schema.json#/$defs/code", "text"),
        ("../order/../common.schema.json#/$defs/a~1b~0c%20%25d", "boolean"),
        ("placed.schema.json#/$defs/own", "bigint"),
        ("#/$defs/list/allOf/0", "bigint"),
        ("../more/far%20away.schema.json#/$defs/back", "text"),
        ("../more/far away.schema.json#/$defs/own", "bigint"),
    ],
)
def test_reference_is_resolved(tmp_path: Path, reference: str, type_: str) -> None:
    own = {"type": "integer", "minimum": 1, "maximum": 9}
    folder = write(
        tmp_path,
        common=COMMON,
        order__placed={**refer(reference), "$id": "urn:placed", "$defs": {"own": own, "list": {"allOf": [own]}}},
    )
    write(
        tmp_path,
        **{
            "more__far away": {
                "$defs": {
                    "back": {"$ref": "../common.schema.json#/$defs/code"},
                    "own": {"$ref": "../order/placed.schema.json#/$defs/own"},
                }
            }
        },
    )
    schema = resolved(folder)
    assert [column.type for column in schema.columns] == [type_]
    wrong = schema.violation({"it": "no"})
    assert wrong is not None
    assert wrong.name == "it"
    assert schema.violation({"it": {"text": "A", "bigint": 5, "boolean": True}[type_]}) is None


def test_allof_brings_properties_of_another_file(tmp_path: Path) -> None:
    base = {"properties": {"id": {"type": "string"}}, "required": ["id"]}
    placed = {"allOf": [{"$ref": "../base.schema.json"}], "properties": {"note": {"type": "string"}}}
    schema = resolved(write(tmp_path, base=base, order__placed=placed))
    assert schema.columns == (Column("note", "text", True), Column("id", "text", False))
    assert schema.violation({"note": "x"}) is not None


def test_properties_may_be_called_like_keywords(tmp_path: Path) -> None:
    properties = {"$ref": {"type": "string"}, "enum": {"$ref": "#/$defs/code"}, "$id": {"type": "string"}}
    schema = resolved(write(tmp_path, order__placed={"properties": properties, "$defs": {"code": {"type": "integer"}}}))
    assert [column.type for column in schema.columns] == ["text", "numeric", "text"]


def test_content_of_data_is_no_reference(tmp_path: Path) -> None:
    document = {"properties": {"it": {"const": {"$ref": "nowhere"}}}, "examples": [{"it": {"$ref": "nowhere"}}]}
    assert resolved(write(tmp_path, order__placed=document)).violation({"it": {"$ref": "nowhere"}}) is None


def test_tree_may_refer_to_itself(tmp_path: Path) -> None:
    node = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    schema = resolved(write(tmp_path, order__placed={**refer("#/$defs/node"), "$defs": {"node": node}}))
    assert schema.violation({"it": {"children": [{"children": []}]}}) is None
    assert schema.violation({"it": {"children": [{"children": 1}]}}) is not None


@pytest.mark.parametrize(
    "reference",
    [
        "missing.schema.json",
        "../common.schema.json#/$defs/missing",
        "../common.schema.json#/$defs/code/pattern/deep",
        "#/allOf/3",
        "#code",
        "../../outside.schema.json",
        "link.schema.json",
        "/etc/hostname",
        "https://example.com/common.schema.json",
        "file:///etc/hostname",
        "urn:common",
        "//example.com/common.schema.json",
        "..%2F..%2Foutside.schema.json",
        "..",
    ],
)
def test_reference_that_leads_nowhere_or_outside_is_refused(tmp_path: Path, reference: str) -> None:
    folder = write(tmp_path / "events", common=COMMON, order__placed=refer(reference))
    write(tmp_path, outside={"type": "string"})
    (folder / "order" / "link.schema.json").symlink_to(tmp_path / "outside.schema.json")
    with raises("schema-unusable"):
        resolved(folder)


@pytest.mark.parametrize(
    "files",
    [
        {"order__placed": {"$ref": "placed.schema.json"}},
        {"order__placed": {**refer("#/$defs/a"), "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"order__placed": {"allOf": [{"$ref": "#"}]}},
        {"order__placed": {"$ref": "../common.schema.json"}, "common": {"$ref": "order/placed.schema.json"}},
    ],
    ids=str,
)
def test_circle_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    with raises("schema-unusable", "circle"):
        _ = resolved(write(tmp_path, **files)).columns


@pytest.mark.parametrize("keyword", ["$id", "$anchor", "$dynamicRef", "$dynamicAnchor"])
def test_keyword_that_changes_references_is_refused(tmp_path: Path, keyword: str) -> None:
    document = {"properties": {"it": {keyword: "word"}}}
    with raises("schema-unusable", keyword):
        resolved(write(tmp_path, order__placed=document))
