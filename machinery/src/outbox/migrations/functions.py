"""Functions of later versions of Postgres, for a server that does not have them: 15 to 17.

They are made in the schema public. Postgres looks for a function in its own schema first. So after an upgrade of the
server its own functions are called, but for a column's default, which calls the function that it was declared with.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

FUNCTIONS: Mapping[str, str] = {
    # Milliseconds since 1970 in 48 bits, version, 12 bits of the fraction as in Postgres 18, variant, and random
    # bits: RFC 9562, sections 5.7 and 6.2 (method 3).
    "uuidv7()": """
        RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
        SELECT encode(
                   substring(int8send(floor(now.ms)::bigint) FROM 3)
                   || substring(int4send(x'7000'::int + floor((now.ms - floor(now.ms)) * 4096)::int) FROM 3)
                   || substring(uuid_send(gen_random_uuid()) FROM 9),
                   'hex')::uuid
          FROM (SELECT extract(epoch FROM clock_timestamp()) * 1000 AS ms) AS now
        $$
    """,
    # NULL for a UUID of another variant than RFC 9562's.
    "uuid_extract_version(uuid)": """
        RETURNS smallint LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
        SELECT CASE get_byte(uuid_send($1), 8) >> 6 WHEN 2 THEN (get_byte(uuid_send($1), 6) >> 4)::smallint END
        $$
    """,
}


def make_missing(connection: Connection) -> None:
    """Make the functions that the server lacks, in the caller's transaction, and none that the database has already."""
    for signature, definition in FUNCTIONS.items():
        if connection.exec_driver_sql("SELECT to_regprocedure(%s)", (signature,)).scalar() is None:
            connection.exec_driver_sql(
                f"CREATE FUNCTION public.{signature} {definition}", execution_options={"no_parameters": True}
            )
