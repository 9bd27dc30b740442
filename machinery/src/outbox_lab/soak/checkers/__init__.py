"""The checkers: each a module with a pure function ``check``, which returns what contradicts one promise."""
