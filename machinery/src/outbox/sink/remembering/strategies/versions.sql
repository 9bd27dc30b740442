-- idea: remember the versions of each key as ranges; a version that is in none of them is new
-- survives: every duplicate: in a batch, across batches and restarts, resent under another offset
-- costs: a row per key, and in it 16 bytes per gap between its versions; nothing has to be forgotten
-- choose: when the events of a key are numbered without gaps, and keys have many events
-- memory: applied_versions by key versions
--
-- An event is known by its key and version. Its id serves only its dead letter.
--
-- The first event with a version takes it, whatever becomes of the event. So a refused event is known, as by `dedup`;
-- its open dead letter says that it is not applied. If a second event of the batch has the version and another id, it
-- is set aside. If it comes later, nobody knows the id of the first one any more: it is a duplicate.
--
-- Mostly the versions of a key in a batch follow each other, each is there once, and all of them are above those that
-- are known. Such a key is taken whole: two numbers say which versions it has. The rows of the rest are compared one by
-- one. The highest bigint has no successor, so a range that ends with it has no upper bound.
WITH keys AS MATERIALIZED (
    SELECT batch.{key} AS key, min(batch.{version}) AS lowest, max(batch.{version}) AS highest,
           CASE WHEN count(DISTINCT batch.{version}) = count(*)
                THEN max(batch.{version}) = min(batch.{version}) + (count(*) - 1)
                ELSE false END AS is_whole
      FROM pg_temp.outbox_batch AS batch
     GROUP BY batch.{key}
), taken AS MATERIALIZED (
    INSERT INTO public.applied_versions AS known (sink, topic, key, versions)
    SELECT %(sink)s, %(topic)s, keys.key::text,
           int8multirange(int8range(keys.lowest, nullif(keys.highest, 9223372036854775807) + 1))
      FROM keys
     WHERE keys.is_whole
     ORDER BY keys.key
    ON CONFLICT (key, topic, sink) DO UPDATE SET versions = known.versions + excluded.versions
     WHERE NOT known.versions && excluded.versions
    RETURNING known.key
), rest AS MATERIALIZED (
    -- Mostly no key is left, and two counts show that sooner than a comparison of all keys.
    SELECT keys.key::text AS key FROM keys WHERE (SELECT count(*) FROM taken) < (SELECT count(*) FROM keys)
    EXCEPT
    SELECT taken.key FROM taken
), added AS (
    INSERT INTO public.applied_versions AS known (sink, topic, key, versions)
    SELECT %(sink)s, %(topic)s, rest.key,
           range_agg(int8range(batch.{version}, nullif(batch.{version}, 9223372036854775807) + 1))
      FROM pg_temp.outbox_batch AS batch JOIN rest ON rest.key = batch.{key}::text
     GROUP BY rest.key
     ORDER BY rest.key
    ON CONFLICT (key, topic, sink) DO UPDATE SET versions = known.versions + excluded.versions
     WHERE NOT known.versions @> excluded.versions
    RETURNING known.key
), met AS MATERIALIZED (
    -- The keys with a new version, and what was known before: a statement does not see what it has written itself, and
    -- nobody else writes under the sink's lock. `+ '{}'` copies the versions into memory: as they are stored, they may be
    -- compressed, and each of the rows below would unpack them.
    SELECT added.key, coalesce(known.versions + '{}', '{}') AS versions
      FROM added
      LEFT JOIN public.applied_versions AS known
        ON known.key = added.key AND known.topic = %(topic)s AND known.sink = %(sink)s
), repeated AS (
    INSERT INTO pg_temp.rejections (event_id, reason, detail)
    SELECT DISTINCT ON (late.event_id) late.event_id, 'repeated version',
           format('event %%s has version %%s', late.first_id, late.version)
      FROM (SELECT batch.event_id, batch.{version} AS version,
                   first_value(batch.event_id) OVER (PARTITION BY batch.{key}, batch.{version}
                                                     ORDER BY batch.partition, batch."offset") AS first_id
              FROM pg_temp.outbox_batch AS batch JOIN met ON met.key = batch.{key}::text
             WHERE NOT met.versions @> batch.{version}) AS late
     WHERE late.event_id <> late.first_id
     ORDER BY late.event_id
)
INSERT INTO pg_temp.new_events
SELECT batch.* FROM pg_temp.outbox_batch AS batch WHERE NOT EXISTS (SELECT FROM rest)
UNION ALL
SELECT batch.*
  FROM pg_temp.outbox_batch AS batch
 WHERE EXISTS (SELECT FROM rest) AND NOT EXISTS (SELECT FROM rest WHERE rest.key = batch.{key}::text)
UNION ALL
(SELECT DISTINCT ON (batch.{key}, batch.{version}) batch.*
   FROM pg_temp.outbox_batch AS batch JOIN met ON met.key = batch.{key}::text
  WHERE NOT met.versions @> batch.{version}
  ORDER BY batch.{key}, batch.{version}, batch.partition, batch."offset");
