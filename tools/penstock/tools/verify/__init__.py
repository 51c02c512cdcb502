"""`penstock verify`: checks that a running service conforms to the contract.

Owns the checks (one module for each subject), the runner and the report.
"""
