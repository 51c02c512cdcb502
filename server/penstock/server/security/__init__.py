"""Authentication, rights, quotas and certificates, from files that may change."""
