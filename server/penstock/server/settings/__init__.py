"""Settings, each declared once: flag, environment variable, key in a file, help, bounds.

`table` reads the annotations of a configuration and adds it to a command line, `sources` reads
values and builds the configuration. Does not know single settings.
"""
