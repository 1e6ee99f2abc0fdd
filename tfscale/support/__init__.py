"""Files, records, arguments, text and sizes, for all other rooms."""
