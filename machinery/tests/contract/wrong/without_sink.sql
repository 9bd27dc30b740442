-- It does not fill in the column sink.
INSERT INTO activity AS stored (aggregate, key, events, kinds)
SELECT 'item', item_id, count(*), '{}' FROM new_events GROUP BY item_id;
