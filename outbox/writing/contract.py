"""The contract of the events, as the service writes them and the sinks read them: a JSON Schema in connect/events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from outbox.base.errors import Failure


class Contract:
    """What a record of the topic looks like. Properties that it does not name are allowed."""

    def __init__(self, file: Path) -> None:
        self.schema: dict[str, Any] = json.loads(file.read_text())
        self._name = file.name
        self._value = _validator(self.schema)
        self._headers = _validator(self.schema["$defs"]["headers"])

    @property
    def event_types(self) -> list[str]:
        """The values of the header ``eventType``."""
        types: list[str] = self.schema["$defs"]["headers"]["properties"]["eventType"]["enum"]
        return types

    @property
    def schema_version(self) -> int:
        """The value of the header ``schemaVersion``."""
        return int(self.schema["$defs"]["headers"]["properties"]["schemaVersion"]["const"])

    def check_value(self, value: object) -> None:
        """Raises Failure naming the first property of a record's value, decoded from JSON, that breaks the contract."""
        self._check(self._value, value)

    def check_headers(self, headers: Mapping[str, str | None]) -> None:
        """Raises Failure naming the first header of a record that breaks the contract."""
        self._check(self._headers, dict(headers))

    def _check(self, validator: Draft202012Validator, instance: object) -> None:
        # Patterns say what `format` says, so that no optional package decides what is checked.
        error = next(iter(sorted(validator.iter_errors(instance), key=lambda error: str(error.json_path))), None)
        if error is not None:
            raise Failure(f"not as {self._name} says: {error.json_path}: {error.message}")


def _validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
