-- The table of the sink `lakehouse`: every event once, with its place on the topic. The columns are the properties of the
-- events' schemas, the name of the event, and its day. The table is partitioned by day, because MERGE and queries by time
-- read days.
--
-- The engine fills in the location. At every start it compares this declaration with the existing table.
-- event_type may be null, so that a table from before it can get it: ALTER TABLE ... ADD COLUMNS (event_type STRING COMMENT
-- '...' AFTER offset).
CREATE TABLE IF NOT EXISTS events (
    event_id      STRING    NOT NULL,
    outbox_day    DATE      NOT NULL COMMENT 'in UTC, of the time within event_id',
    partition     INT       NOT NULL,
    offset        BIGINT    NOT NULL,
    event_type    STRING             COMMENT 'balance.debited or balance.credited',
    transfer_id   STRING    NOT NULL,
    account_id    STRING    NOT NULL,
    amount        BIGINT    NOT NULL COMMENT 'signed, minor units',
    currency      STRING    NOT NULL,
    balance_after BIGINT    NOT NULL COMMENT 'minor units',
    version       BIGINT    NOT NULL COMMENT 'the event is the version-th of its account',
    occurred_at   TIMESTAMP NOT NULL
)
USING delta
PARTITIONED BY (outbox_day)
LOCATION %(location)s
