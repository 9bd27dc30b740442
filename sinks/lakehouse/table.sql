-- The table of the sink `lakehouse`: every event once, with its place on the topic. The columns are those of
-- sinks/staged.sql, in Delta's types, and the day of the event, by which it is partitioned: a day is what MERGE looks at,
-- and what a query by time reads.
--
-- The engine puts in where it lies. On every start it is compared with the table that is there.
CREATE TABLE IF NOT EXISTS events (
    event_id      STRING    NOT NULL,
    event_day     DATE      NOT NULL COMMENT 'in UTC, of the time within event_id',
    partition     INT       NOT NULL,
    offset        BIGINT    NOT NULL,
    account_id    STRING    NOT NULL,
    amount        BIGINT    NOT NULL COMMENT 'signed, minor units',
    currency      STRING    NOT NULL,
    balance_after BIGINT    NOT NULL COMMENT 'minor units',
    version       BIGINT    NOT NULL COMMENT 'the event is the version-th of its account',
    occurred_at   TIMESTAMP NOT NULL
)
USING delta
PARTITIONED BY (event_day)
LOCATION %(location)s
