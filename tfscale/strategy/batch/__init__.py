"""Which rows of a batch each replica takes."""
