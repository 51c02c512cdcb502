"""`penstock verify`: a running service held against what the contract promises.

Owns the checks, one module for each matter, how they are run and the report.
"""
