"""Settings, each declared once: its flag, its variable, its key in a file, its help, its bounds.

`table` reads the annotations of a configuration and adds it to a command line, `sources` reads
values and builds the configuration. Does not know single settings.
"""
