"""Plain torch oracles, one per op: any device, any dtype, float64 for truth."""
