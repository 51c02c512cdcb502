"""Settings, each declared once: its flag, its variable, its key in a file, its help, its bounds.

`table` reads the annotations of a configuration, `sources` reads values and builds the
configuration, `flags` adds it to a command line. Does not know single settings.
"""
