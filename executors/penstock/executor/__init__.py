"""What runs a batch: the executors behind the seam that the scheduler owns, and their choice.

Importing this package loads no executor; `create.create_executor` imports the one it is asked for.
"""
