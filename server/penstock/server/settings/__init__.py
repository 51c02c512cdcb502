"""Settings. Each is declared once, with flag, environment variable, key in a file, help and limits.

`table` reads the annotations of a configuration and adds its settings to a command line. `sources`
reads values and builds the configuration. `json_values` converts values to JSON and back. No single
setting is defined here.
"""
