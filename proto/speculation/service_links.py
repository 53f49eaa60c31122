"""Tells the variables that Kubernetes puts into a pod for every Service from settings.

https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
"""

from collections.abc import Mapping

_HOST, _PORT = "_SERVICE_HOST", "_SERVICE_PORT"


def service_links(environment: Mapping[str, str]) -> set[str]:
    """Returns the names of such variables.

    Every Service has NAME_SERVICE_HOST and NAME_SERVICE_PORT; further ones begin with
    NAME_SERVICE_PORT_ and NAME_PORT.
    """
    names: set[str] = set()
    for host in environment:
        service = host.removesuffix(_HOST)
        if service == host or f"{service}{_PORT}" not in environment:
            continue
        begins = (f"{service}{_PORT}_", f"{service}_PORT_")
        names |= {name for name in environment if name.startswith(begins)}
        names |= {host, f"{service}{_PORT}", f"{service}_PORT"}
    return names
