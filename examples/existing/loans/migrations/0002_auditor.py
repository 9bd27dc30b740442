"""Let `outbox check` read what it compares the sink with."""

from __future__ import annotations

from django.db import migrations


class Migration(migrations.Migration):  # type: ignore[misc] # Django has no types of its own
    """Grants two columns to a role of the outbox."""

    dependencies = (("loans", "0001_initial"),)
    operations = (
        migrations.RunSQL(
            "GRANT SELECT (isbn, lent) ON loans_book TO library_auditor",
            "REVOKE SELECT (isbn, lent) ON loans_book FROM library_auditor",
        ),
    )
