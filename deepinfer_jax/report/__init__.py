"""Records in, tables and figures out."""
