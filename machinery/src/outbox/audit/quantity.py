"""Numbers of events: exact, also those with a fraction."""

from __future__ import annotations

from decimal import Context, Decimal, InvalidOperation

# The default context rounds to 28 digits.
EXACT = Context(prec=1000)
DIGITS_MAX = 200  # of a number; the contract refuses longer ones


def text_of(value: Decimal, sign: str = "") -> str:
    """A number in plain digits: no exponent, no zeros at the end."""
    text = f"{value:{sign}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number_of(text: str | None) -> Decimal | None:
    """The number of a property; None if it has none, as in a payload that breaks the contract."""
    try:
        number = None if text is None or len(text) > DIGITS_MAX else EXACT.create_decimal(text)
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None
