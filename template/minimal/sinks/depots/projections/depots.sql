-- The parcels of each depot: the sum of its events, in any order.
INSERT INTO depot_parcels AS stored (sink, depot_id, parcels, version)
SELECT %(sink)s, depot_id, sum(count), max(version)
  FROM new_events
 GROUP BY depot_id
 ORDER BY depot_id -- one order for all writers: no deadlocks
ON CONFLICT (sink, depot_id) DO UPDATE
   SET parcels = stored.parcels + excluded.parcels,
       version = greatest(stored.version, excluded.version);
