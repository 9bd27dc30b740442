-- The balance of each account: that of the newest state which came.
--
-- Newest by version, not by arrival: a dead letter that is replayed, or a change that the slot still holds when a snapshot
-- is taken, comes after younger states. So each change of a row must move its version on, as the service does.
--
-- An account that is deleted stays, empty, with the version that it had: by that, older states are known for old. Of a
-- deleted row the log has the key and no version, so a deletion counts where it stands among the changes of its row, which
-- come in order. (Here it is one half of a primary key that is changed; the service deletes no account.)
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
