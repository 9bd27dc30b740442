"""The fixture domain's services: one in each framework, with the same routes."""

from __future__ import annotations

SERVICES = {"flask": "stock.service:create_app", "fastapi": "stock.async_service:create_app"}
