-- idea: every event is new; balance += amount
-- survives: nothing: drifts by the sum of whatever comes twice
-- costs: nothing
-- choose: never; it is here to be watched drifting
-- start: earliest
INSERT INTO fresh SELECT * FROM staged;
