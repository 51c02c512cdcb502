"""Generates load for any server of the contract, in one or several processes, and measures it.

Owns schedules, lengths, prompts, sending and recording. Uses the client and nothing of the server;
it receives a trace as plain rows. `penstock bench` is its command line. It needs the extra
`bench` (HdrHistogram), which is imported when something is recorded.
"""
