-- The parcels of each depot, as its newest event states them: for strategies that take states.
INSERT INTO depot_parcels AS stored (sink, depot_id, parcels, version)
SELECT DISTINCT ON (depot_id) %(sink)s, depot_id, parcels_after, version
  FROM new_events
 ORDER BY depot_id, version DESC
ON CONFLICT (sink, depot_id) DO UPDATE
   SET parcels = excluded.parcels, version = excluded.version
 WHERE excluded.version > stored.version;
