"""The programs around the service: simulate, plan, bench, timeline, verify, demo.

They import the product; nothing of the product imports them.
"""
