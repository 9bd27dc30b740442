"""Evidence that the promises hold, and that the tests would notice if they did not."""
