-- The two databases and the roles of every part, each with the least it needs; none is a superuser.
--
-- Run by psql as a superuser, once for the cluster: by the embedded stack, by docker-compose (the service `roles`), or by you
-- against a Postgres of your own. Running it again changes nothing but the passwords, so that is how to rotate them.
-- Passwords come from the environment, never from an argument or this file. What a role may do with a table is granted by
-- the migration that makes the table.

\set ON_ERROR_STOP on
SET log_statement = 'none'; -- a password is no log line
SET log_min_error_statement = 'panic';

\getenv ledger_owner_password OUTBOX_LEDGER_OWNER_PASSWORD
\getenv ledger_app_password OUTBOX_LEDGER_APP_PASSWORD
\getenv ledger_cdc_password OUTBOX_LEDGER_CDC_PASSWORD
\getenv ledger_pruner_password OUTBOX_LEDGER_PRUNER_PASSWORD
\getenv ledger_auditor_password OUTBOX_LEDGER_AUDITOR_PASSWORD
\getenv balances_owner_password OUTBOX_BALANCES_OWNER_PASSWORD
\getenv balances_sink_password OUTBOX_BALANCES_SINK_PASSWORD
\getenv balances_auditor_password OUTBOX_BALANCES_AUDITOR_PASSWORD

SELECT format('CREATE ROLE %I', role)
  FROM unnest(ARRAY['ledger_owner', 'ledger_app', 'ledger_cdc', 'ledger_pruner', 'ledger_auditor',
                    'balances_owner', 'balances_sink', 'balances_auditor']) AS role
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role)
\gexec

ALTER ROLE ledger_owner LOGIN PASSWORD :'ledger_owner_password';
ALTER ROLE ledger_app LOGIN PASSWORD :'ledger_app_password';
ALTER ROLE ledger_cdc LOGIN REPLICATION PASSWORD :'ledger_cdc_password';
ALTER ROLE ledger_pruner LOGIN PASSWORD :'ledger_pruner_password';
ALTER ROLE ledger_auditor LOGIN PASSWORD :'ledger_auditor_password';
ALTER ROLE balances_owner LOGIN PASSWORD :'balances_owner_password';
ALTER ROLE balances_sink LOGIN PASSWORD :'balances_sink_password';
ALTER ROLE balances_auditor LOGIN PASSWORD :'balances_auditor_password';

-- Nobody waits for ever on a service or a sink that went away with a transaction open. Not for Debezium: its snapshot is
-- one long transaction that may wait for Kafka.
ALTER ROLE ledger_app SET idle_in_transaction_session_timeout = '60s';
ALTER ROLE balances_sink SET idle_in_transaction_session_timeout = '60s';

SELECT format('CREATE DATABASE %I OWNER %I', database, database || '_owner')
  FROM unnest(ARRAY['ledger', 'balances']) AS database
 WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = database)
\gexec

REVOKE ALL ON DATABASE ledger, balances FROM PUBLIC;
GRANT CONNECT ON DATABASE ledger TO ledger_app, ledger_cdc, ledger_pruner, ledger_auditor;
-- A sink stages each batch in a temporary table.
GRANT CONNECT, TEMPORARY ON DATABASE balances TO balances_sink;
GRANT CONNECT ON DATABASE balances TO balances_auditor;
