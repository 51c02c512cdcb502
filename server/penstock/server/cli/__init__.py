"""The commands that run and call the service, and their common code.

The commands are serve, generate, chat, models, health, top and version. The `penstock` program is
`penstock.tools.command_line`; it also has the commands of penstock.tools.
"""
