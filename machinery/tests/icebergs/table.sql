-- The table of the sink `lakehouse`: every event once, with its place on the topic.
CREATE TABLE IF NOT EXISTS events (
    event_id    STRING    NOT NULL,
    outbox_day  DATE      NOT NULL COMMENT 'in UTC, of the time within event_id',
    partition   INT       NOT NULL,
    offset      BIGINT    NOT NULL,
    event_type  STRING    NOT NULL,
    movement_id STRING    NOT NULL,
    item_id     STRING    NOT NULL,
    quantity    BIGINT    NOT NULL,
    unit        STRING    NOT NULL,
    stock_after BIGINT    NOT NULL,
    version     BIGINT    NOT NULL,
    occurred_at TIMESTAMP NOT NULL
)
USING iceberg
PARTITIONED BY (outbox_day)
LOCATION %(location)s
