"""The commands that run the service and call it, and what all commands share.

Owns serve, build, generate, chat, models, health, top and version. The program itself, which adds
the tools' commands, is `penstock.tools.command_line`.
"""
