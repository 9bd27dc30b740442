-- The two databases and the roles of every part, each with the least it needs. None is a superuser.
--
-- Run it by psql as a superuser, once per cluster: the embedded stack and docker-compose (service `roles`) do; you do for a
-- Postgres of your own. A second run changes nothing but the passwords, which is how to rotate them.
-- Names and passwords come from the environment (the settings of the same name), never from an argument or this file. The
-- migration that makes a table grants what each role may do with it.
--
-- Without OUTBOX_SINK_DB_NAME it makes no sink database. A source database that belongs to another owner is that of an
-- existing service (docs/existing-service.md): it keeps its owner and its grants.

\set ON_ERROR_STOP on
-- Statements below have passwords. Whatever the server logs otherwise, it logs none of them, and keeps none.
SET log_statement = 'none';
SET log_min_error_statement = 'panic';
SET log_min_duration_statement = -1;
SET log_min_duration_sample = -1;
SET log_transaction_sample_rate = 0;
SET pg_stat_statements.track = 'none'; -- where these two extensions are not loaded, the names mean nothing
SET pgaudit.log = 'none';

\getenv source_db OUTBOX_SOURCE_DB_NAME
\getenv source OUTBOX_SOURCE_DB_ROLE_PREFIX
\getenv sink_db OUTBOX_SINK_DB_NAME
\getenv sink OUTBOX_SINK_DB_ROLE_PREFIX
\getenv source_owner_password OUTBOX_SOURCE_DB_OWNER_PASSWORD
\getenv source_app_password OUTBOX_SOURCE_DB_APP_PASSWORD
\getenv source_cdc_password OUTBOX_SOURCE_DB_CDC_PASSWORD
\getenv source_pruner_password OUTBOX_SOURCE_DB_PRUNER_PASSWORD
\getenv source_auditor_password OUTBOX_SOURCE_DB_AUDITOR_PASSWORD
\getenv sink_owner_password OUTBOX_SINK_DB_OWNER_PASSWORD
\getenv sink_writer_password OUTBOX_SINK_DB_WRITER_PASSWORD
\getenv sink_pruner_password OUTBOX_SINK_DB_PRUNER_PASSWORD
\getenv sink_auditor_password OUTBOX_SINK_DB_AUDITOR_PASSWORD

SELECT :'source' || '_owner' AS source_owner, :'source' || '_app' AS source_app, :'source' || '_cdc' AS source_cdc,
       :'source' || '_pruner' AS source_pruner, :'source' || '_auditor' AS source_auditor
\gset

SELECT format('CREATE ROLE %I', role)
  FROM unnest(ARRAY[:'source_owner', :'source_app', :'source_cdc', :'source_pruner', :'source_auditor']) AS role
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role)
\gexec

ALTER ROLE :"source_owner" LOGIN PASSWORD :'source_owner_password';
ALTER ROLE :"source_cdc" LOGIN REPLICATION PASSWORD :'source_cdc_password';
ALTER ROLE :"source_pruner" LOGIN PASSWORD :'source_pruner_password';
ALTER ROLE :"source_auditor" LOGIN PASSWORD :'source_auditor_password';
-- Without a password it is a group: the role of an existing service becomes a member of it.
\if :{?source_app_password}
ALTER ROLE :"source_app" LOGIN PASSWORD :'source_app_password';
\endif

-- A service or a sink that went away with a transaction open holds nobody up for ever. Not for Debezium: its snapshot is
-- one long transaction that may wait for Kafka.
ALTER ROLE :"source_app" SET idle_in_transaction_session_timeout = '60s';

-- Debezium's snapshot of a table whose policies hide rows fails, instead of leaving them out.
ALTER ROLE :"source_cdc" SET row_security = off;

-- JSON needs UTF8, whatever the cluster's own encoding.
SELECT format('CREATE DATABASE %I OWNER %I ENCODING ''UTF8'' TEMPLATE template0', :'source_db', :'source_owner')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'source_db')
\gexec

SELECT pg_get_userbyid(datdba) <> :'source_owner' AS source_is_theirs FROM pg_database WHERE datname = :'source_db'
\gset
\if :source_is_theirs
GRANT CONNECT, CREATE ON DATABASE :"source_db" TO :"source_owner"; -- CREATE: a publication
\else
REVOKE ALL ON DATABASE :"source_db" FROM PUBLIC;
\endif
GRANT CONNECT ON DATABASE :"source_db" TO :"source_app", :"source_cdc", :"source_pruner", :"source_auditor";

\if :{?sink_db}
SELECT :'sink' || '_owner' AS sink_owner, :'sink' || '_writer' AS sink_writer, :'sink' || '_pruner' AS sink_pruner,
       :'sink' || '_auditor' AS sink_auditor
\gset

SELECT format('CREATE ROLE %I', role)
  FROM unnest(ARRAY[:'sink_owner', :'sink_writer', :'sink_pruner', :'sink_auditor']) AS role
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role)
\gexec

ALTER ROLE :"sink_owner" LOGIN PASSWORD :'sink_owner_password';
ALTER ROLE :"sink_writer" LOGIN PASSWORD :'sink_writer_password';
ALTER ROLE :"sink_pruner" LOGIN PASSWORD :'sink_pruner_password';
ALTER ROLE :"sink_auditor" LOGIN PASSWORD :'sink_auditor_password';
ALTER ROLE :"sink_writer" SET idle_in_transaction_session_timeout = '60s';

SELECT format('CREATE DATABASE %I OWNER %I ENCODING ''UTF8'' TEMPLATE template0', :'sink_db', :'sink_owner')
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'sink_db')
\gexec

REVOKE ALL ON DATABASE :"sink_db" FROM PUBLIC;
-- A sink copies each batch into a temporary table.
GRANT CONNECT, TEMPORARY ON DATABASE :"sink_db" TO :"sink_writer";
GRANT CONNECT ON DATABASE :"sink_db" TO :"sink_pruner", :"sink_auditor";
\endif

-- Last, because a new session logs its statements again.
\if :source_is_theirs
\connect :"source_db"
GRANT USAGE, CREATE ON SCHEMA public TO :"source_owner";
GRANT USAGE ON SCHEMA public TO :"source_app", :"source_cdc", :"source_pruner", :"source_auditor";
\endif
