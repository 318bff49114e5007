"""READ: the only code that reads the world. The reader process imports this package, so it stays empty."""
