"""Settings, each declared once: its flag, its variable, its key in a file, its help, its bounds.

`table` finds what the annotations of a configuration declare, `sources` reads what users give and
builds the configuration, `flags` shows it. Knows no setting by name.
"""
