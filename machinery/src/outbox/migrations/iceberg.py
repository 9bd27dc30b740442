"""The tables of an Iceberg catalog in the sink database, for a project that has a sink with an `IcebergTarget`."""

from __future__ import annotations

from outbox.migrations.migrate import execute, role

# As Iceberg's JdbcCatalog and pyiceberg's SqlCatalog know them.
TABLES = """
CREATE TABLE public.iceberg_tables (
    catalog_name text NOT NULL,
    table_namespace text NOT NULL, -- the sink
    table_name text NOT NULL,
    metadata_location text, -- the newest version: a commit replaces it, if it is the one that the commit has read
    previous_metadata_location text,
    iceberg_type text,
    PRIMARY KEY (catalog_name, table_namespace, table_name)
);
CREATE TABLE public.iceberg_namespace_properties (
    catalog_name text NOT NULL, namespace text NOT NULL, property_key text NOT NULL, property_value text,
    PRIMARY KEY (catalog_name, namespace, property_key)
);
"""


def make_iceberg_catalog() -> None:
    """Make the catalog, in a migration of the sink database."""
    execute(TABLES)
    execute(f"GRANT SELECT, INSERT, UPDATE ON public.iceberg_tables TO {role('writer')}")
    execute(f"GRANT SELECT, INSERT ON public.iceberg_namespace_properties TO {role('writer')}")
    execute(f"GRANT SELECT ON public.iceberg_tables TO {role('auditor')}")
