"""Rounds of local steps, and sums that travel behind steps."""
