"""Open descriptors of this process: every connection needs one, and the usual limit is 1,024."""

from __future__ import annotations

import resource

MOST_DESCRIPTORS = 65_536
RESERVED_DESCRIPTORS = 256
"""What connections leave to files, pipes and child processes."""


def descriptor_limit() -> int:
    """The number of descriptors that this process may have after `raise_descriptor_limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_DESCRIPTORS
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    return max(soft, most)


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors as far as allowed and useful; return it."""
    most, (soft, hard) = descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
