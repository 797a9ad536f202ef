"""The server's page needs no key, and exists only if it is asked for."""

from tests.helpers import served


def test_the_page_is_open_and_everything_else_needs_the_key():
    with served.serve(page=True, api_key="secret") as running:
        page = running.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
        assert running.get("/v1/models").status_code == running.get("/metrics").status_code == 401


def test_without_the_option_there_is_no_page():
    with served.serve() as running:
        assert running.get("/").status_code == 404
