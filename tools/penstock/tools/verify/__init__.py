"""`penstock verify`: checks that a service conforms to the API; the service is already running, or
the command starts it.

Contains the checks (one module per subject), the runner and the report.
"""
