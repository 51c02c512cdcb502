"""Load generator for any server of Penstock's API; sends from one or several processes.

Contains the schedules, lengths and prompts of requests, the sending with the Python client, and the
recording; `command` is the command line. Recording requires the extra `bench` (HdrHistogram).
"""
