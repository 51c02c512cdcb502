"""The policy file of a running service: the policy in it, and a newer one when there is one.

Owns that a broken file never replaces a good policy. Knows no clock: whoever needs the policy asks
`poll` about once a second.
"""

import logging
from pathlib import Path

from penstock.server.security.policy import Policy
from penstock.server.security.policy_text import BadPolicy, parse_policy
from penstock.server.security.watched_file import FilesChanged, Stamp, read_together, stamp_of

_log = logging.getLogger(__name__)


class PolicyFile:
    """One file, watched. Raises ValueError or OSError when it holds no policy to begin with.

    `is_behind_proxy`: a proxy tells the tenants, so that nobody proves anything here; then the
    policy must hold no credentials, and otherwise it must.
    """

    def __init__(self, path: Path, *, is_behind_proxy: bool = False) -> None:
        self._path = path
        self._is_behind_proxy = is_behind_proxy
        self.policy, self._stamp = _load(path, is_behind_proxy=is_behind_proxy)

    def poll(self) -> bool:
        """Look whether the file has changed; True when `policy` is another now.

        A file that is gone or broken is told once, and the policy stays as it was.
        """
        stamp = stamp_of((self._path,))
        if stamp == self._stamp:
            return False
        try:
            policy, self._stamp = _load(self._path, is_behind_proxy=self._is_behind_proxy)
        except FilesChanged:
            return False
        except (ValueError, OSError) as error:
            self._stamp = stamp
            _log.error("the policy stays as it was: %s", error)
            return False
        if policy == self.policy:
            return False
        self.policy = policy
        _log.info("a new policy holds, of %d tenants", len(policy.tenants))
        return True


def _load(path: Path, *, is_behind_proxy: bool) -> tuple[Policy, Stamp]:
    try:
        (data,), stamp = read_together((path,))
        policy = parse_policy(data.decode("utf-8"), path.parent)
    except UnicodeDecodeError:
        raise BadPolicy(f"{path}: is not UTF-8") from None
    except BadPolicy as error:
        raise BadPolicy(f"{path}: {error}") from None
    if is_behind_proxy and policy.has_credentials:
        raise BadPolicy(
            f"{path}: holds credentials, and tenant-metadata-key lets a proxy say who calls; they"
            " exclude each other"
        )
    if not is_behind_proxy and not policy.has_credentials:
        raise BadPolicy(f"{path}: holds no credentials, so nobody could call")
    return policy, stamp
