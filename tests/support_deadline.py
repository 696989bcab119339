"""The deadline of every wait in the tests: generous, because a wait that succeeds costs nothing by it."""

DEADLINE_S = 60.0
