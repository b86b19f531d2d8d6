"""The filesystem tier: one file per chunk, in a directory that several engines may share."""
