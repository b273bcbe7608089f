"""Public functions: check, choose, allocate, one registered torch op."""
