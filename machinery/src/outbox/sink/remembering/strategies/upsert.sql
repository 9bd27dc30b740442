-- idea: each event carries the state after it; an event with a higher version than its key's is new
-- survives: every duplicate, and lost events too once a later one of the key arrives; keeps no history
-- costs: a row per key; each event, of whatever type, must carry the whole state, and a version that only grows
-- choose: when events carry state: then this is the simplest, and nothing has to be remembered or dropped
-- memory: key_versions by key version
-- takes: states
--
-- The guard is the version. The id of the last event would not do: of several older events that are repeated, all but
-- the last differ from it, and the state would go back to theirs.
--
-- Only versions that were applied count: a rejected event must not hide an earlier one that is replayed.
--
-- [select]
INSERT INTO pg_temp.new_events
SELECT DISTINCT ON (batch.{key}, batch.{version}) batch.*
  FROM pg_temp.outbox_batch AS batch
  LEFT JOIN public.key_versions AS known
    ON known.sink = %(sink)s AND known.topic = %(topic)s AND known.key = batch.{key}::text
 WHERE known.version IS NULL OR batch.{version} > known.version
 ORDER BY batch.{key}, batch.{version}, batch.partition, batch."offset";

-- [remember]
INSERT INTO public.key_versions AS known (sink, topic, key, version)
SELECT %(sink)s, %(topic)s, new.{key}::text, max(new.{version})
  FROM pg_temp.new_events AS new
 GROUP BY new.{key}::text
 ORDER BY new.{key}::text
ON CONFLICT (sink, topic, key) DO UPDATE SET version = greatest(known.version, excluded.version);
