"""URLs of external models that are given over HTTP: only listed hosts, whatever tricks the URL plays."""

from __future__ import annotations

import pytest

from proxy.settings import Settings
from proxy.upstream.hosts import check_url
from tokengrove.errors import ConfigurationError, InvalidRequest

HOSTS = ("api.judge.test", "*.models.test", "10.0.0.7", "::1")


@pytest.mark.parametrize(
    "url",
    [
        *("https://api.judge.test/v1", "http://API.Judge.Test:8000/v1", "https://a.b.models.test/v1"),
        *("http://10.0.0.7/v1", "http://[::1]:9/v1"),
    ],
)
def test_listed_hosts_may_be_used(url: str) -> None:
    check_url(url, HOSTS)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "https://judge.test/v1",
            "https://evil.api.judge.test/v1",
            "https://models.test/v1",
            "https://xmodels.test/v1",
        ),
        *(
            "https://api.judge.test.evil.test/v1",
            "https://api.judge.test./v1",
            "http://127.0.0.1/v1",
            "http://0x0a000007",
        ),
        *(
            "https://api.judge.test@evil.test/v1",
            "https://evil.test\\@api.judge.test/v1",
            "https://evil.test\\.models.test",
            "https://@api.judge.test/v1",
        ),
        *("https://api.judge.test/v1?x=1", "https://api.judge.test/v1#x", "https://evil.test#@api.judge.test"),
        *("ftp://api.judge.test/v1", "file:///etc/passwd", "//api.judge.test/v1", "api.judge.test/v1", ""),
        *("https://evil.test/\n.models.test", "https://ev\til.models.test/v1", "https://*.models.test/v1"),
        *("https://api.judge.test:0/v1", "https://api.judge.test:99999/v1", "https://[::1/v1", "http://[::2]/v1"),
        *("https://äpi.models.test/v1", "https://evil%2f.models.test/v1", "https://a.models.test/" + "x" * 3000),
    ],
)
def test_every_other_url_is_refused_by_the_name_of_its_field(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_url(url, HOSTS, "models.judge.url")
    assert caught.value.param == "models.judge.url"


def test_without_a_list_no_url_may_be_used() -> None:
    with pytest.raises(InvalidRequest, match="--model-hosts does not list"):
        check_url("https://api.judge.test/v1", ())


@pytest.mark.parametrize("hosts", ["https://judge.test", "judge.test:80", "*", ","])
def test_a_malformed_list_ends_the_start(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="--model-hosts"):
        Settings(model_hosts=hosts)
