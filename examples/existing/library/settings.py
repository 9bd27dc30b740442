"""Django's settings. The database is the one that libpq's variables name, PGHOST and the like."""

from __future__ import annotations

import os

SECRET_KEY = os.environ.get("LIBRARY_SECRET_KEY", "only for development")
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
INSTALLED_APPS = ["loans"]
ROOT_URLCONF = "library.urls"
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "library",
        "USER": "library",
        "HOST": os.environ.get("PGHOST", "127.0.0.1"),
        "PORT": os.environ.get("PGPORT", "5432"),
        "PASSWORD": os.environ.get("PGPASSWORD", ""),
    }
}
