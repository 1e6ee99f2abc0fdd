"""Layouts: who holds which numbers of a variable."""
