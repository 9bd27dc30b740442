-- The cars in each garage: the sum of its events, in any order.
INSERT INTO garage_cars AS stored (sink, garage, cars, version)
SELECT %(sink)s, garage, sum(change), max(version)
  FROM new_events
 GROUP BY garage
 ORDER BY garage -- one order for all writers: no deadlocks
ON CONFLICT (sink, garage) DO UPDATE
   SET cars = stored.cars + excluded.cars,
       version = greatest(stored.version, excluded.version);
