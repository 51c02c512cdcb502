"""Authenticates callers, and provides their rights, their quotas and the service's TLS
certificates. All are read from files. The files are read again when they change."""
