"""`penstock verify`: checks that a service, running or started for it, conforms to the API.

Contains the checks (one module per subject), the runner and the report.
"""
