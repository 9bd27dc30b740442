"""The routes of the service."""

from __future__ import annotations

from django.urls import path
from django.views.decorators.http import require_POST

from loans import views

urlpatterns = [
    path("books/<isbn>/lend", require_POST(views.lend)),
    path("books/<isbn>/give-back", require_POST(views.give_back)),
]
