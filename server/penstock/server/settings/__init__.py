"""Reads settings from flags, environment variables and files, and converts them to configurations.

Each setting is declared once, with its names, help text and limits, in an annotation of a
configuration. `table` reads the annotations and adds the settings to a command line. `sources`
reads values and builds the configuration. `json_values` converts values to JSON and back. No single
setting is defined here.
"""
