"""Executors run batches for the scheduler; a factory creates them.

Importing this package loads no executor; `create.create_executor` imports only the requested one.
"""
