"""The commands that run and call the service, and what they share.

Owns serve, build, generate, chat, models, health, top and version. The program itself, which adds
the tools' commands, is `penstock.tools.command_line`.
"""
