"""Generates load for any server of the contract and measures it, in one or several processes.

Owns schedules, lengths, prompts, the sending and the recording. Knows the client and nothing of the
server; a trace reaches it as plain rows. `penstock bench` is its command line. It needs the extra
`bench` (HdrHistogram), which is imported when something is recorded.
"""
