-- The columns of an event, as the strategies and projections find it in the table `staged`.
-- The engine needs the first three; the rest are yours and are filled, by name, from what sinks/events.py decodes.
event_id      uuid        NOT NULL, -- the header `id`, a UUIDv7
partition     int         NOT NULL,
"offset"      bigint      NOT NULL,
account_id    uuid        NOT NULL,
amount        numeric     NOT NULL, -- signed, minor units
currency      text        NOT NULL,
balance_after bigint      NOT NULL, -- minor units
version       bigint      NOT NULL, -- the event is the account's version-th
occurred_at   timestamptz NOT NULL
