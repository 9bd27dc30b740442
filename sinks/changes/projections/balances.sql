-- The balance of each account is that of its newest state.
--
-- Newest means the highest version, not the last arrival. A replayed dead letter, or a change that the slot still holds
-- when a snapshot is taken, arrives after younger states. So each change of a balance must raise the row's version, as the
-- service does. (Another column, such as the status, may change without it: this sink does not read it.)
--
-- A deleted account stays with a balance of 0 and its version, so that older states are recognised as old. The log has no
-- version of a deleted row, so a deletion counts by its place among the changes of the row, which arrive in order. (Here a
-- deletion is one half of a changed primary key: the service deletes no account.)
-- Limit: a primary key that another row takes over must continue above its last version; else its balance stays 0.
UPDATE balances AS stored
   SET balance_minor = 0, updated_at = now()
  FROM new_events
 WHERE new_events.op = 'd' AND stored.sink = %(sink)s AND stored.account_id = new_events.account_id;

INSERT INTO balances AS stored (sink, account_id, currency, balance_minor, version, events)
SELECT DISTINCT ON (account_id)
       %(sink)s, account_id, currency, CASE WHEN "offset" < deleted_at THEN 0 ELSE balance_minor END, version, changes
  FROM (SELECT *,
               max("offset") FILTER (WHERE op = 'd') OVER (PARTITION BY account_id) AS deleted_at,
               count(*) OVER (PARTITION BY account_id) AS changes
          FROM new_events) AS change
 WHERE op <> 'd'
 ORDER BY account_id, version DESC, "offset"
ON CONFLICT (sink, account_id) DO UPDATE
   SET currency = excluded.currency,
       balance_minor = excluded.balance_minor,
       version = excluded.version,
       events = stored.events + excluded.events,
       updated_at = now()
 WHERE excluded.version > stored.version;
