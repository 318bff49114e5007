"""ACT: the only code that signals a process; a command of a person, never the daemon."""
