"""A benchmark on the control node: which variants, in what order, what was measured, what follows from it."""
