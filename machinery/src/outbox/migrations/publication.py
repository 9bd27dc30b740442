"""The publications that Debezium reads, and what keeps one from having all that its table gets.

A slot passes over each change that its publication leaves out: all of them if it does not exist. The server then only
logs a warning.
"""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.base.heavy import extensions

OUTBOX = "outbox"
# Inserts only: the deletion of a relayed row is no event.
CREATE = f"CREATE PUBLICATION {OUTBOX} FOR TABLE public.outbox WITH (publish = 'insert')"
STATE = """
SELECT pubinsert, pubupdate AND pubdelete, pubupdate OR pubdelete OR pubtruncate, published.tablename IS NOT NULL,
       published.rowfilter IS NOT NULL, listed.prattrs IS NOT NULL
  FROM pg_publication
  LEFT JOIN pg_publication_tables AS published
         ON published.pubname = pg_publication.pubname AND schemaname = %(schema)s AND tablename = %(table)s
  LEFT JOIN pg_publication_rel AS listed
         ON prpubid = pg_publication.oid AND prrelid = to_regclass(format('%%I.%%I', %(schema)s, %(table)s))
 WHERE pg_publication.pubname = %(publication)s
"""
MISSED = "`outbox check` finds events that were written meanwhile and not relayed"
OWNER = "SELECT pg_get_userbyid(pubowner), pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = %s"


def problem(
    cursor: extensions.cursor, publication: str, schema: str, table: str, *, is_outbox: bool = True
) -> str | None:
    """The fault of a publication; None if it publishes the inserts of its table, whole, and no other operation.

    The publication of a table that is no outbox publishes updates and deletes too.
    """
    cursor.execute(STATE, {"publication": publication, "schema": schema, "table": table})
    found = cursor.fetchone()
    if found is None:
        return "does not exist"
    has_inserts, has_changes, has_others, has_table, has_filter, has_list = found
    wrong = {
        f"does not have the table {schema}.{table}": not has_table,
        "leaves out rows by a filter": has_filter,
        "leaves out columns by a list": has_list,
        "does not publish inserts": not has_inserts,
        "publishes more than inserts": is_outbox and has_others,
        "does not publish updates and deletes": not is_outbox and not has_changes,
    }
    return ", ".join(words for words, is_so in wrong.items() if is_so) or None


def repair(cursor: extensions.cursor) -> str | None:
    """Make the outbox's publication as it must be, and return what was wrong with it.

    Raises Failure `publication-foreign` if it belongs to a role that this one cannot act for.
    """
    wrong = problem(cursor, OUTBOX, "public", "outbox")
    if wrong is None:
        return None
    cursor.execute(OWNER, [OUTBOX])
    found = cursor.fetchone()
    if found is not None and not found[1]:
        raise Failure(
            f"the publication {OUTBOX} {wrong}, and belongs to role {found[0]}",
            f"DROP PUBLICATION {OUTBOX} as that role, then `outbox migrate`",
            code="publication-foreign",
        )
    cursor.execute(f"DROP PUBLICATION IF EXISTS {OUTBOX}; {CREATE}")
    return f"the publication {OUTBOX}, which {wrong}: {MISSED}"
