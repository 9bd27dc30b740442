"""Numbers of events: exact, also those with a fraction."""

from __future__ import annotations

from decimal import Context, Decimal

Quantity = int | Decimal

# The default context rounds to 28 digits.
EXACT = Context(prec=1000)


def text_of(value: Quantity, sign: str = "") -> str:
    """A number in plain digits: no exponent, no zeros at the end."""
    text = f"{value:{sign}f}" if isinstance(value, Decimal) else f"{value:{sign}d}"
    return text.rstrip("0").rstrip(".") if "." in text else text
