"""State of an optimizer in parts, of which each replica holds one."""
