"""Who may do what: credentials, rights, limits and certificates, from files that may change."""
