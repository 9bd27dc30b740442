-- idea: the event says the balance after it; new is what has a higher version than the account
-- survives: every duplicate, and lost events too, once a later one comes; keeps no history
-- costs: nothing; but each event must carry the whole state, and a version that only grows
-- takes: states
-- choose: when events carry state: then this is the simplest, and nothing has to be remembered or dropped
--
-- The guard is the version. The last event's id would not do: of several older events that come again, all but
-- the last differ from it, and the balance would go back to theirs.
--
-- The projection adds up, so the newest event brings the difference to what is stored, and those before it nothing.
INSERT INTO fresh (event_id, partition, "offset", account_id, amount, currency, balance_after, version, occurred_at)
SELECT DISTINCT ON (account_id, currency, version)
       event_id, partition, "offset", account_id,
       CASE version WHEN max(version) OVER (PARTITION BY account_id, currency)
                    THEN balance_after - coalesce(stored.balance_minor, 0)
                    ELSE 0 END,
       currency, balance_after, version, occurred_at
  FROM staged
  LEFT JOIN (SELECT account_id, balance_minor, version AS stored_version FROM balances WHERE sink = %(sink)s) AS stored
      USING (account_id)
 WHERE version > coalesce(stored_version, 0)
 ORDER BY account_id, currency, version, partition, "offset";
