"""Choice of the rows of a batch that each replica takes."""
