"""No credential of a URL gets into a text, whatever it looks like and wherever it stands."""

import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from controller.store.redis_client import RedisUrlError, connect
from controller.store.redis_url import redact

HOSTS = ("10.0.0.7:6379", "cache", "[::1]:6379", "a.b-c:1,d.e:2")
PATHS = ("", "/0", "/fleet/0")
SCHEMES = ("redis", "rediss", "redis+sentinel", "redis+cluster")

# Long enough not to occur in a host or in the texts by chance.
secrets = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=["Cs", "Cc"]),
    min_size=6,
    max_size=20,
).filter(lambda text: not any(text in fixed for fixed in (*HOSTS, *PATHS, *SCHEMES)))
FORMS = {
    "account": "{scheme}://ann:{secret}@{host}{path}",
    "no user": "{scheme}://:{secret}@{host}{path}",
    "user": "{scheme}://{secret}:x@{host}{path}",
    "user alone": "{scheme}://{secret}@{host}{path}",
    "query": "{scheme}://{host}{path}?password={secret}",
    "among a query": "{scheme}://{host}{path}?db=0&username={secret}&password=y",
    "both": "{scheme}://ann:{secret}@{host}{path}?password={secret}&db=1",
    "any key": "{scheme}://{host}{path}?whatever={secret}",
}


def forms(secret: str) -> set[str]:
    return {secret, quote(secret, safe=""), quote_plus(secret), repr(secret), json.dumps(secret)}


@given(
    secret=secrets,
    form=st.sampled_from(sorted(FORMS)),
    scheme=st.sampled_from(SCHEMES),
    host=st.sampled_from(HOSTS),
    path=st.sampled_from(PATHS),
    encode=st.sampled_from([str, lambda text: quote(text, safe=""), quote_plus]),
)
@example("hun/ter2@x?y#z", "account", "redis", "cache", "/0", str)
@example("hunter2&db=secret", "query", "redis", "cache", "/0", str)
def test_a_secret_is_in_no_text(secret, form, scheme, host, path, encode):
    given_as = encode(secret)
    url = FORMS[form].format(scheme=scheme, secret=given_as, host=host, path=path)
    shown = redact(url, url)
    for part in (secret, given_as):
        assert part not in shown
    assert shown.startswith(f"{scheme}://")
    # Raw delimiters in a query end its value: what follows is another parameter.
    whole = encode is not str or ("query" not in form and form not in {"both", "any key"})
    assume(whole or not set(secret) & set("&#;%+"))
    assume(encode is not str or "%" not in secret)
    for quoted in forms(secret):
        hidden = redact(f"cannot connect to {url}: {quoted} is wrong", url)
        assert quoted not in hidden
        assert secret not in hidden
    for text in (f"cannot connect to {url!r}", json.dumps({"url": url})):
        hidden = redact(text, url)
        assert secret not in hidden
        assert given_as not in hidden


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://cache:6379/0", "redis://cache:6379/0"),
        ("rediss://ann:pass@word@host:1/0", "rediss://***@host:1/0"),
        ("redis://h/0?password=x", "redis://h/0?***"),
        ("redis+sentinel://:x@a:1,b:2/fleet/0", "redis+sentinel://***@a:1,b:2/fleet/0"),
        ("redis://:hunter2@127.0.0.1:1/0?x=@y", "redis://***"),
        ("redis://:a?b@host/0", "redis://***"),
        ("redis://ann:secret", "redis://***"),
        ("ann:secret@host", "***"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("unix://:x@/run/redis.sock?db=1", "unix://***@/run/redis.sock?***"),
        ("unix://:x@y", "unix://***"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str):
    assert redact(url, url) == shown


@pytest.mark.parametrize("quoted", ["two%20words", "two+words"])
def test_a_space_is_hidden_however_it_was_quoted(quoted: str):
    url = f"redis://:{quoted}@cache/0"
    assert redact("two words, two%20words, two+words", url) == "***, ***, ***"


@pytest.mark.parametrize("url", ["unix:///no/such.sock", "redis://h?socket_keepalive=no&db=1"])
def test_words_that_are_no_secret_stay(url: str):
    assert redact("1: cannot be reached", url) == "1: cannot be reached"
    assert redact("cannot", "redis://h?password=no") == "can***t"


@given(
    secret=secrets, form=st.sampled_from(sorted(FORMS)), port=st.sampled_from(["", ":x", ":9e9"])
)
@example("hunter/2", "account", "")
@example("hunter:2", "query", ":x")
def test_a_url_that_is_refused_names_no_secret(secret: str, form: str, port: str):
    url = FORMS[form].format(scheme="redis+sentinel", secret=secret, host=f"h{port}", path="")
    try:
        connect(url, 1.0)
    except RedisUrlError as error:
        text = f"{error} {error!r} {error.__cause__!r}"
        assert secret not in text
        assert all(part not in text for part in secret.split("/") if len(part) > 5)
