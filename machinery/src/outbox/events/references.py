"""`$ref` from one schema file to another, resolved when the files are read: each schema becomes one document.

A reference is a relative path, a JSON Pointer, or both: ``../common.schema.json#/$defs/uuid``. Paths stay inside the
folder of events. The document of a file is its own; the contents of other files are put under its ``$defs``, by the
file's path.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from outbox.base.errors import Failure

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Their content is data, not a schema.
DATA = {"const", "enum", "default", "examples"}
MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # by names of the author
# They change what a reference means. The file's path and a JSON Pointer name every schema already.
NOT_SUPPORTED = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor")
NESTING_MAX = 100  # of a file; the validator itself ends at 128

Json = Any


def bundle(file: Path, folder: Path) -> dict[str, Json]:
    """The schema of a file as one document that refers to nothing outside of it.

    Raises Failure if a file is missing or is no JSON object, or if a reference leaves ``folder``.
    """
    file, folder = file.resolve(), folder.resolve()
    document = read(file)
    document.pop("$id", None)  # would be the base of references; here that is the file's path
    _rewrite(document, document, file, folder, {file: "#"})
    return document


def resolve(document: Mapping[str, Json], rule: Json) -> Mapping[str, Json]:
    """The rule with what it refers to within the document. Raises Failure for a circle."""
    found: dict[str, Json] = {}
    followed: list[str] = []
    while isinstance(rule, dict):
        found = {**rule, **found}
        reference = str(rule.get("$ref", ""))
        if not reference.startswith("#"):
            break
        if reference in followed:
            raise unusable(reference, "its references form a circle")
        followed.append(reference)
        rule = pointed_at(document, reference)
    return found


def has(document: Mapping[str, Json], rule: Json, keyword: str) -> bool:
    """Whether a keyword is true in a rule of the document, or in any schema that it contains or refers to.

    Raises Failure if the keyword has another value than true or false.
    """
    waiting, followed = [rule], set[str]()
    while waiting:
        for node in _nodes(waiting.pop()):
            if not isinstance(node.get(keyword, False), bool):
                raise unusable(keyword, f"it is {node[keyword]!r}, and must be true or false")
            if node.get(keyword):
                return True
            reference = str(node.get("$ref", ""))
            if reference.startswith("#") and reference not in followed:
                followed.add(reference)
                waiting.append(pointed_at(document, reference))
    return False


def pointed_at(document: Json, pointer: str) -> Json:
    """The value that a JSON Pointer (``#/…``, RFC 6901) names. Raises LookupError or TypeError if that is nothing."""
    target = document
    for part in pointer.removeprefix("#").removeprefix("/").split("/") if pointer not in ("", "#") else ():
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        target = target[int(name)] if isinstance(target, list) and name.isdecimal() else target[name]
    return target


def _rewrite(document: dict[str, Json], top: Json, file: Path, folder: Path, roots: dict[Path, str]) -> None:
    """Let references in a schema of a file lead to places in the document. ``roots``: where each file is in it."""
    for node in list(_nodes(top)):
        wrong = [name for name in NOT_SUPPORTED if isinstance(node.get(name), str)]
        if wrong:
            raise unusable(file, f"{wrong[0]} is not supported: refer by a path and a JSON Pointer (#/…)")
        if not isinstance(node.get("$ref"), str):
            continue
        path, _, pointer = node["$ref"].partition("#")
        target = (file.parent / unquote(path)).resolve() if path else file
        if ":" in path or not target.is_relative_to(folder):
            raise unusable(file, f"{node['$ref']} is not a file in {folder.name}")
        if pointer and not pointer.startswith("/"):
            raise unusable(file, f"{node['$ref']} is not a path and a JSON Pointer (#/…)")
        if target not in roots:
            name = target.relative_to(folder).as_posix()
            roots[target] = "#/$defs/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="~")
            content = read(target)
            content.pop("$id", None)
            content.pop("$schema", None)
            document.setdefault("$defs", {})[name] = content
            _rewrite(document, content, target, folder, roots)
        node["$ref"] = roots[target] + pointer


def read(file: Path) -> dict[str, Json]:
    """The JSON object in a file. Raises Failure if the file is missing, holds no JSON object, or is nested too deep."""
    try:
        content = loads(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, ValueError) as error:
        raise unusable(file, str(error)) from None
    except RecursionError:
        raise unusable(file, f"it is nested deeper than {NESTING_MAX} levels") from None
    if not isinstance(content, dict):
        raise unusable(file, "it is no JSON object")
    if content.get("$schema", DIALECT) not in (DIALECT, f"{DIALECT}#"):
        raise unusable(file, f"its $schema is {content['$schema']!r}, and the validator knows {DIALECT}")
    if is_deep(content, NESTING_MAX):
        raise unusable(file, f"it is nested deeper than {NESTING_MAX} levels")
    return content


def is_deep(decoded: Json, levels_max: int) -> bool:
    """Whether decoded JSON is nested deeper than so many levels."""
    nested = [decoded] if isinstance(decoded, dict | list) else []
    for _ in range(levels_max):
        children = (child for value in nested for child in (value.values() if isinstance(value, dict) else value))
        nested = [child for child in children if isinstance(child, dict | list)]
    return bool(nested)


def unusable(file: Path | str, problem: str) -> Failure:
    """The failure of a schema that cannot be used."""
    return Failure(f"event schema {file}: {problem}", "correct the file", code="schema-unusable")


def loads(document: bytes) -> Json:
    """Decode JSON as RFC 8259 defines it for exchange between systems.

    Python's own decoder also reads UTF-16, UTF-32, a byte order mark, ``NaN`` and repeated keys. Another reader of the
    same text could then see other values. Raises ValueError if the document is invalid, and RecursionError if it is
    nested too deeply.
    """
    text = document.decode()
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark")
    return json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Two members of one name are no mistake to Python: it drops the first, and with it perhaps a property."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number in JSON")
    return number


def _nodes(node: Json) -> Iterator[dict[str, Json]]:
    """A schema and all schemas in it."""
    if not isinstance(node, dict):
        return
    yield node
    for name, child in node.items():
        if name in DATA:
            continue
        if name in MAPS and isinstance(child, dict):
            for named in child.values():
                yield from _nodes(named)
        else:
            for one in child if isinstance(child, list) else [child]:
                yield from _nodes(one)
