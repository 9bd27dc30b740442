"""The books. This migration is older than the outbox."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc] # Django has no types of its own
    """Makes the table."""

    initial = True
    operations = (
        migrations.CreateModel(
            name="Book",
            fields=[
                ("isbn", models.CharField(max_length=13, primary_key=True, serialize=False)),
                ("title", models.TextField()),
                ("copies", models.PositiveIntegerField()),
                ("lent", models.PositiveIntegerField(default=0)),
            ],
        ),
    )
