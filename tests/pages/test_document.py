"""Pages are one document with everything in it, guarded by a policy that fits it."""

import base64
import hashlib
import re

import pytest

from moe_jax.pages.document import document

NAMESPACE = "http://www.w3.org/2000/svg"
"""A name, which no browser fetches."""


@pytest.mark.parametrize("name", ["run", "chat"])
def test_a_page_has_no_address_of_others(name):
    text = document(name).html.decode().replace(NAMESPACE, "")
    assert not re.findall(r"https?:|(?<!:)//\w[\w.]+\.\w|@import|url\(", text)
    assert re.findall(r"\b(?:src|href)=[^\s>]+", text) == ['href="data:,"']


@pytest.mark.parametrize("name", ["run", "chat"])
def test_the_policy_allows_only_the_pages_own_style_and_script(name):
    page = document(name)
    policy = page.headers["Content-Security-Policy"]
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.html.decode(), re.DOTALL)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}';" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"\sstyle=|\son\w+=", page.html.decode()), "the policy refuses styles and handlers in tags"
