"""Tables of the library."""

from __future__ import annotations

from django.db import models


class Book(models.Model):  # type: ignore[misc] # Django has no types of its own
    """A book, of which the library has some copies."""

    isbn = models.CharField(max_length=13, primary_key=True)
    title = models.TextField()
    copies = models.PositiveIntegerField()
    lent = models.PositiveIntegerField(default=0)
