"""Look the installed packages up in PyPI's database of vulnerabilities: audit.py PIP_AUDIT
SITE_PACKAGES.

Exit status 1 for a known vulnerability, and when pip-audit fails for another reason than the
network. Where the database cannot be reached, or a mirror answers that it knows no package, nothing
was audited: that is said, and passes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

NETWORK = re.compile(
    r"ConnectionError|ConnectTimeout|ReadTimeout|SSLError|ProxyError|HTTPError|Max retries|timed "
    r"out"
)


def main(pip_audit: str, site_packages: str) -> int:
    """Run pip-audit on a folder of installed packages; print what came of it."""
    command = [pip_audit, "--path", site_packages, "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        status, text = 0, "NOT AUDITED: the database did not answer in 300 s"
    else:
        status, text = judge(done.stdout, done.stderr)
    print(text)
    return status


def judge(output: str, errors: str) -> tuple[int, str]:
    """Exit status and message for what pip-audit wrote to its standard output (JSON) and standard
    error."""
    try:
        packages: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["pip-audit said nothing"])[-1][:300]
        if NETWORK.search(errors):
            return 0, f"NOT AUDITED: the database of vulnerabilities cannot be reached: {last}"
        return 1, f"pip-audit failed: {last}"
    known = [package for package in packages if "vulns" in package]
    unknown = [package["name"] for package in packages if "vulns" not in package]
    found = [
        (
            f"{package['name']} {package['version']}: {flaw['id']}, fixed in "
            f"{', '.join(flaw['fix_versions']) or 'none'}"
        )
        for package in known
        for flaw in package["vulns"]
    ]
    if not known:
        return (
            0,
            "NOT AUDITED: the package index here has no vulnerability data for any of "
            f"{len(packages)} packages",
        )
    beside = f"; not known there: {', '.join(unknown)}" if unknown else ""
    if found:
        return 1, "\n".join(
            [f"{len(found)} known vulnerabilities in {len(known)} packages{beside}", *found]
        )
    return 0, f"{len(known)} packages audited, no known vulnerabilities{beside}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
