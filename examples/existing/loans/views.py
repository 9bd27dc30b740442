"""Lend a book, and take it back. The row and the event are committed together."""

from __future__ import annotations

import json

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from outbox.dbapi import Event, append

from loans.models import Book


def lend(request: HttpRequest, isbn: str) -> HttpResponse:
    """Lend a copy to a reader, unless none is left."""
    reader = json.loads(request.body)["reader"]
    with transaction.atomic():
        book = get_object_or_404(Book.objects.select_for_update(), pk=isbn)
        if book.lent == book.copies:
            return JsonResponse({"error": "no copy is left"}, status=409)
        book.lent += 1
        book.save()
        payload = {"isbn": isbn, "reader": reader, "occurred_at": timezone.now()}
        append(connection, Event("book", isbn, "lent", payload))
    return JsonResponse({"isbn": isbn, "lent": book.lent}, status=201)


def give_back(request: HttpRequest, isbn: str) -> HttpResponse:
    """Take a copy back from a reader."""
    reader = json.loads(request.body)["reader"]
    with transaction.atomic():
        book = get_object_or_404(Book.objects.select_for_update(), pk=isbn)
        if book.lent == 0:
            return JsonResponse({"error": "no copy is lent"}, status=409)
        book.lent -= 1
        book.save()
        payload = {"isbn": isbn, "reader": reader, "occurred_at": timezone.now()}
        append(connection, Event("book", isbn, "returned", payload))
    return JsonResponse({"isbn": isbn, "lent": book.lent}, status=201)
