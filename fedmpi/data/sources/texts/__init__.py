"""Sources that are texts: symbols, and after each of them the next one."""
