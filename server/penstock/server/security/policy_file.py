"""The policy file of a running service and its key set, reloaded when they change.

Owns their validation, which is the same in every process, and that an invalid file never replaces a
valid one. Has no clock: call `poll` about once a second.
"""

import logging
from pathlib import Path

from penstock.server.security.key_set import BadKeySet, KeySet, check_installed, read_key_set
from penstock.server.security.policy import JwtPolicy, Policy
from penstock.server.security.policy_text import BadPolicy, parse_policy
from penstock.server.security.watched_file import FilesChanged, Stamp, read_together, stamp_of

_log = logging.getLogger(__name__)


class PolicyFile:
    """One policy, watched. Raises ValueError or OSError when it is invalid at the start.

    `is_behind_proxy`: a proxy names the tenants; then the policy must not contain credentials, and
    otherwise it must. `has_client_certificates`: TLS is mutual, so that names of certificates can
    be used. Without `needs_keys` it also starts with a policy whose key set cannot be read: a
    process that authenticates no callers needs only its limits.
    """

    def __init__(
        self,
        path: Path,
        *,
        is_behind_proxy: bool = False,
        has_client_certificates: bool = False,
        needs_keys: bool = True,
    ) -> None:
        self._path = path
        self._is_behind_proxy = is_behind_proxy
        self._has_client_certificates = has_client_certificates
        self._last_error = ""
        self._newer: Policy | None = None
        self._keys_stamp: Stamp = ()
        self.keys: KeySet | None = None
        self.policy, self._stamp = self._read()
        try:
            self.keys, self._keys_stamp = _read_keys(self.policy.jwt)
        except (ValueError, OSError) as error:
            if needs_keys:
                raise
            _log.error("the policy is in force without its keys: %s", error)

    def poll(self) -> bool:
        """Check whether a file has changed; True when `policy` or `keys` were replaced.

        A missing or invalid file is logged once, and the old values stay. A newer policy that only
        lacks its key set is read again at every check, since the key set may follow. Meanwhile the
        keys of the policy in force are watched.
        """
        self._check()
        if self._newer is not None and self._replace(self._newer):
            return True
        return self._poll_keys()

    def _check(self) -> None:
        """Read the policy if its file has changed."""
        stamp = stamp_of((self._path,))
        if stamp == self._stamp:
            return
        try:
            newer, self._stamp = self._read()
        except FilesChanged:
            return
        except (ValueError, OSError) as error:
            self._stamp = stamp
            self._newer, self._last_error = None, ""
            self._report(error)
            return
        # The file may contain the policy in force again, after an invalid one.
        self._newer, self._last_error = None if newer == self.policy else newer, ""

    def _replace(self, newer: Policy) -> bool:
        try:
            keys, keys_stamp = _read_keys(newer.jwt)
        except FilesChanged:
            return False
        except (ValueError, OSError) as error:
            self._report(error)
            return False
        self.policy, self.keys, self._keys_stamp = newer, keys, keys_stamp
        self._newer, self._last_error = None, ""
        _log.info("a new policy is in force, with %d tenants", len(newer.tenants))
        return True

    def _poll_keys(self) -> bool:
        jwt = self.policy.jwt
        if jwt is None:
            return False
        stamp = stamp_of((jwt.jwks_file,))
        if stamp == self._keys_stamp:
            return False
        try:
            self.keys, self._keys_stamp = _read_keys(jwt)
        except FilesChanged:
            return False
        except (ValueError, OSError) as error:
            self._keys_stamp = stamp
            _log.error("the old keys stay in force: %s", error)
            return False
        _log.info("a new key set is in force")
        return True

    def _report(self, error: Exception) -> None:
        if str(error) != self._last_error:
            self._last_error = str(error)
            _log.error("the old policy stays in force: %s", error)

    def _read(self) -> tuple[Policy, Stamp]:
        path = self._path
        try:
            (data,), stamp = read_together((path,))
            policy = parse_policy(data.decode("utf-8"), path.parent)
        except UnicodeDecodeError:
            raise BadPolicy(f"{path}: is not UTF-8") from None
        except BadPolicy as error:
            raise BadPolicy(f"{path}: {error}") from None
        fault = self._fault(policy)
        if fault is not None:
            raise BadPolicy(f"{path}: {fault}")
        return policy, stamp

    def _fault(self, policy: Policy) -> str | None:
        """Why the policy cannot be used by this service."""
        if self._is_behind_proxy:
            if not policy.has_credentials:
                return None
            return (
                "contains credentials, and tenant-metadata-key takes tenants from a proxy; they"
                " exclude each other"
            )
        if not policy.has_credentials:
            return "contains no credentials, so every call would be refused"
        if policy.certificates and not self._has_client_certificates:
            return "names certificates, which requires tls-client-ca"
        return None


def _read_keys(jwt: JwtPolicy | None) -> tuple[KeySet | None, Stamp]:
    if jwt is None:
        return None, ()
    check_installed()
    (data,), stamp = read_together((jwt.jwks_file,))
    try:
        keys = read_key_set(data, jwt.algorithms)
    except BadKeySet as error:
        raise BadKeySet(f"{jwt.jwks_file}: {error}") from None
    return keys, stamp
