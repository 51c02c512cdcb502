"""The executors, which run batches for the scheduler, and their factory.

Importing this package loads no executor; `create.create_executor` imports the requested one.
"""
