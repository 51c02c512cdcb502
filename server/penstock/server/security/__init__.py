"""Authenticates callers, and provides their rights, their quotas and the TLS certificates. All are
read from files, which are read again when they change."""
