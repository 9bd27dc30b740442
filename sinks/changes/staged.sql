-- The columns of a change of an account, as strategies/changes.sql and projection.sql find it in the table `staged`.
-- The engine needs the first three; the rest are filled, by name, from what events.py decodes.
event_id      uuid   NOT NULL, -- made of the four that tell changes apart: table, key, LSN, op; no UUIDv7
partition     int    NOT NULL,
"offset"      bigint NOT NULL,
table_name    text   NOT NULL,
account_id    uuid   NOT NULL, -- the row's primary key
op            text   NOT NULL, -- r: of a snapshot; c, u, d: inserted, updated, deleted
lsn           bigint NOT NULL, -- where the change stands in the ledger's log; of a snapshot's rows, where it was taken
currency      text,            -- the rest is the row afterwards; nothing, if it was deleted
balance_minor bigint,          -- minor units
version       bigint           -- how many transfers have changed the account
