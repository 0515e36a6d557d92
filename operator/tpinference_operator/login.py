"""Where the API server is and who the operator is, for both of its HTTP clients (kube.py, kopf).

In a pod: the service account's token file, read again as kubelet rotates it. Elsewhere: the
kubeconfig. Proxy variables of the environment are not followed unless a setting asks for it:
a proxy meant for downloads must not swallow calls to the API server.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

USER_AGENT = "tpinference-operator"
SERVICE_HOST_ENV = "KUBERNETES_SERVICE_HOST"
KUBECONFIG_ENV = "KUBECONFIG"

OnResponse = Callable[[str, str, bool], None]
"""Called with method, path and whether it is a watch, when a request was answered with 200."""


async def load_configuration(*, follow_proxy_env: bool) -> Configuration:
    """The service account of this pod, or the kubeconfig when there is none."""
    configuration = Configuration()
    if SERVICE_HOST_ENV in os.environ and KUBECONFIG_ENV not in os.environ:
        config.load_incluster_config(client_configuration=configuration)
    else:
        await config.load_kube_config(
            client_configuration=configuration,
            config_file=os.environ.get(KUBECONFIG_ENV),
            persist_config=False,
        )
    configuration.client_session_kwargs = {"trust_env": follow_proxy_env}
    return configuration


async def auth_headers(configuration: Configuration) -> dict[str, str]:
    """The headers of the next request; the token is read anew when its file may have changed."""
    headers = {"User-Agent": USER_AGENT}
    token = await configuration.get_api_key_with_prefix("BearerToken")
    if token:
        headers["Authorization"] = token.strip()
    elif configuration.username:
        headers["Authorization"] = configuration.get_basic_auth_token()
    return headers


def open_session(configuration: Configuration, on_response: OnResponse) -> aiohttp.ClientSession:
    """A session for kopf: every request gets the token of that moment."""
    client = RESTClientObject(configuration)
    trace = aiohttp.TraceConfig()

    async def start(
        _session: aiohttp.ClientSession, _context: object, params: aiohttp.TraceRequestStartParams
    ) -> None:
        params.headers.update(await auth_headers(configuration))

    async def end(
        _session: aiohttp.ClientSession, _context: object, params: aiohttp.TraceRequestEndParams
    ) -> None:
        if params.response.status == 200:
            on_response(params.method, params.url.path, "watch" in params.url.query)

    trace.on_request_start.append(start)
    trace.on_request_end.append(end)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=client.ssl_context),
        trust_env=bool((configuration.client_session_kwargs or {}).get("trust_env")),
        proxy=configuration.proxy,
        trace_configs=[trace],
        headers={"User-Agent": USER_AGENT},
    )
